"""What is observed on a live DeepSpeed engine, never what is done: collectives, gradients and states, memory.

Every instrument takes the engine that ``deepspeed.initialize`` returned and leaves the run bit-identical.
"""
