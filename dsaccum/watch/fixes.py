"""The smallest fix in terms of what drives the run, where that is another than the general one."""

from __future__ import annotations

_MASK_PADDING = "set the labels of padding to -100: labels[attention_mask == 0] = -100"
_DEEPSPEED_DIVIDES_TWICE = (
    "DeepSpeed 0.18.3 to 0.19.5 do so where the model returns loss and logits; use 0.18.2, or 0.19.6"
)
_SUM_OF_TOKENS = (
    "sum the token losses (reduction='sum') and divide by the target tokens of the whole window on all ranks"
)

Z_LOSS_FIX = (
    "sum the z-loss over tokens, and divide it by what the cross entropy is divided by: in Trainer num_items_in_batch, "
    "else the target tokens of the whole window"
)
REST_OF_AN_EPOCH_FIX = (
    "let the optimizer step at an epoch's end, too, and divide by the micro-batches (better: target tokens) that this "
    "short window holds; or drop the rest: clear the gradients before each epoch"
)
INVERTED_NO_SYNC_FIX = (
    "the condition of no_sync() is inverted: no_sync() belongs on all micro-steps but the last, forward and backward"
)
WEIGHTS_SAY = "look at the weights above: they say which micro-batches count for what"
NO_WEIGHTS_FIT = (
    "the gradient is no weighted sum of the micro-batches' own: look for parameters or buffers that change within the "
    "window (weights swapped for an evaluation), gradients changed by hand, or what an earlier window left in them"
)
_NUM_ITEMS = (
    "use num_items_in_batch in compute_loss, for which Trainer does not divide: cross_entropy(..., reduction='sum') / "
    "num_items_in_batch, on several ranks times self.accelerator.num_processes"
)


def _times_world_size(who: str, world: str) -> str:
    return (
        f"multiply the loss by {world}: {who} averages over the ranks, so that a count of all ranks' targets is "
        "divided by once too often; where the script divides by the number of ranks itself, take that out"
    )


def config_without_accumulation(held: int) -> str:
    """For an engine that takes each micro-step for a window, and a script that steps after several."""
    return (
        f"gradient_accumulation_steps is 1 in the config, or not there: set it to {held}, hand the undivided loss to "
        "engine.backward, and call engine.step() after every micro-step; the engine finds the boundary"
    )


_CLIP_ONCE = "once, after the window's last backward and before optimizer.step(), over all that the optimizers step"
_TRAINER = {
    "clipping-mismatch": "leave clipping to Trainer: max_grad_norm in TrainingArguments, and none in code of yours",
    "loss-not-scaled": _NUM_ITEMS,
    "mean-of-means": _NUM_ITEMS,
    "ranks-averaged-twice": _times_world_size("Trainer", "self.accelerator.num_processes"),
    "targets-counted-before-shift": "transformers' Trainer counts labels != -100 before the causal shift for models "
    "such as GPT-2; labels[:, 0] = -100 in the collator changes no loss and makes both counts equal; or give Trainer "
    "a compute_loss_func that counts labels[:, 1:]",
    "loss-scaled-twice": "two of Trainer, Accelerate and DeepSpeed divide by the accumulation steps. If no code of "
    f"yours does: {_DEEPSPEED_DIVIDES_TWICE}",
    "rank-mean-of-means": "average_tokens_across_devices=True in the training arguments: num_items_in_batch is then "
    "counted over all ranks; a compute_loss of your own that divides by it multiplies by "
    "self.accelerator.num_processes",
    "padding-counted": f"{_MASK_PADDING}, in the collator; DataCollatorForLanguageModeling does so for the pad token",
}
_ACCELERATE = {
    "ranks-share-data": "let the loader go through accelerator.prepare(): only then each rank gets its own part",
    "step-inside-window": "let the optimizer go through accelerator.prepare(): only then its step() and zero_grad() "
    "wait for the window's last micro-batch; and run each in accelerator.accumulate(model)",
    "ranks-averaged-twice": _times_world_size("Accelerate", "accelerator.num_processes"),
    "clipping-mismatch": f"call accelerator.clip_grad_norm_ where accelerator.sync_gradients is true: {_CLIP_ONCE}",
    "loss-scaled-twice": "accelerator.backward divides already: take loss / N out of the script. If nothing there "
    f"divides: {_DEEPSPEED_DIVIDES_TWICE}",
    "mean-of-means": f"{_SUM_OF_TOKENS} (accelerator.gather); multiply by the accumulation steps and the number of "
    "processes, which are divided by later",
    "rank-mean-of-means": "count over all ranks: accelerator.gather(targets).sum() before the window's first "
    "micro-step; divide by it, and multiply by the number of processes, which are averaged over",
    "short-window-full-divisor": "accelerator.backward divides by N = gradient_accumulation_steps also where an "
    "epoch's last window holds fewer: multiply the loss by N / held there (held: the loader's length modulo N), or "
    "drop it",
    "padding-counted": _MASK_PADDING,
}
_DEEPSPEED = {
    "ranks-averaged-twice": _times_world_size("DeepSpeed", "the world size"),
    "short-window-full-divisor": "engine.backward divides by N of the config also where an epoch's last window holds "
    "fewer: multiply the loss by N / held there, or drop it",
    "padding-counted": _MASK_PADDING,
    "optimizer-count-offset": "bf16 at ZeRO 0: DeepSpeed makes an empty optimizer step at start; use ZeRO 1",
    "ranks-share-data": "give each rank its own part: DistributedSampler(dataset) with rank and world size, or give "
    "deepspeed.initialize the dataset as training_data",
}
_BARE = {
    "ranks-averaged-twice": _times_world_size("DDP", "the world size"),
    "clipping-mismatch": f"call clip_grad_norm_ {_CLIP_ONCE}",
    "loss-scaled-twice": "divide the loss by N once: take one loss / N out of the loop",
    "loss-not-scaled": "divide the loss by the number of micro-batches: (loss / N).backward()",
    "only-last-micro-batch": "delete zero_grad() from the micro-step: clear gradients once, after optimizer.step()",
    "step-inside-window": "call optimizer.step() once for N micro-batches, not after each",
    "mean-of-means": f"{_SUM_OF_TOKENS}; under DDP multiply by the number of ranks, since it averages",
    "clipped-every-micro-step": "clip once, between the window's last backward and optimizer.step()",
    "ranks-not-reduced": "leave no_sync() before the window's last forward and backward, which reduces",
    "ranks-share-data": "give each rank its own part: DistributedSampler(dataset), and sampler.set_epoch(epoch)",
    "short-window-full-divisor": "divide by the micro-batches (better: target tokens) that the short window really "
    "holds, or drop it",
    "padding-counted": _MASK_PADDING,
}
_ANY = {
    "samples-misplaced": "look at the sampler, and at what the loop does with a batch at the micro-steps named here: "
    "in one window each sample is due once. An iterator that is begun again gives its first batches again",
    "micro-batch-dropped": "look for a skipped backward, or a loss that is detached, at the micro-steps marked above",
}
_FIXES = {
    "Trainer": _TRAINER,
    "TRL": _TRAINER,
    "Accelerate": _ACCELERATE,
    "DeepSpeed": _DEEPSPEED,
    "DDP": _BARE,
    "bare": _BARE,
}


def fix_for(identifier: str, framework: str, kind: str, general: str) -> str:
    """By who drives the run, else by its kind, else the general one."""
    who_clips = identifier == "clipping-mismatch" and kind == "DeepSpeed"
    for who in () if who_clips else (framework, kind.partition(",")[0]):
        if identifier in _FIXES.get(who, {}):
            return _FIXES[who][identifier]
    return _ANY.get(identifier, general)
