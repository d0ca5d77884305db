"""The seeds: what was to be shown of gradient accumulation before anything else, each with its negative control.

Here are those that no other folder has; the list says where each of them is. Run: pytest -n 0 tests/seeds

    one-step and K-step equivalence per parameter    test_updates_per_parameter.py
    N = 1 bit-identical                              tests/training/test_n1_is_a_bare_loop.py
    2 ranks x N steps against one process            test_ranks_against_one_process.py;
                                                     tests/training/test_splits_agree.py
    ranks bit-identical after each step              test_ranks_against_one_process.py;
                                                     tests/instruments/test_replicas.py
    all-reduce only at the boundary                  tests/instruments/test_collectives.py;
                                                     tests/verification/test_communication.py
    memory flat                                      tests/instruments/test_memory.py; tests/verification/test_memory.py
    synchronous slicing of all fields                tests/batch/test_batch.py; tests/reference/test_samples.py
    unequal micro-batches                            tests/engine/test_gradient_is_the_token_mean.py;
                                                     test_hand_worked.py
    one update per window                            test_one_update_per_window.py
    invalid input refused                            tests/configs/inputs/test_bad_inputs.py; tests/config;
                                                     tests/training/test_loop.py
    activation checkpointing, same gradients         test_activation_checkpointing.py; tests/model/test_model.py
    bf16                                             tests/engine/test_remedies.py; tests/reference/test_window.py;
                                                     tests/verification/test_equivalent.py, test_no_remedies.py
    27 tokens learnt by heart at N = 1, 4, 16        test_tiny_corpus.py
    Accelerate as a third implementation             test_accelerate_agrees.py
    hand-worked, to the bit                          test_hand_worked.py; tests/reference/test_window.py
    own models and losses                            test_own_models.py (models.py)
"""
