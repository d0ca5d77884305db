"""What each cause means to a person: a line of summary, and the smallest fix, by fault identifier."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = "unknown-difference"


class Advice(NamedTuple):
    """Words for one cause."""

    summary: str
    fix: str


ADVICE: dict[str, Advice] = {
    "loss-not-scaled": Advice(
        "nobody divides by the number of accumulation steps: the gradient is N times too large",
        "let engine.backward divide (call it without scale_wrt_gas=False), or divide the loss by N once",
    ),
    "loss-scaled-twice": Advice(
        "two layers divide by the number of accumulation steps: the gradient is N times too small",
        "hand the undivided loss to engine.backward: take loss / N out of the loop. If nothing there divides: "
        "DeepSpeed 0.18.3 to 0.19.5 do so twice where the model returns loss and logits; use 0.18.2, or 0.19.6 and up",
    ),
    "only-last-micro-batch": Advice(
        "gradients are cleared inside the window: only its last micro-batch reaches the optimizer",
        "delete zero_grad() from the micro-step; engine.step() clears gradients at the boundary",
    ),
    "micro-batch-dropped": Advice(
        "a micro-batch that has targets adds nothing to the gradient",
        "look for a skipped backward, or a loss that is detached, at the micro-steps marked in the matrix",
    ),
    "step-inside-window": Advice(
        "the optimizer steps more than once in a window",
        "call engine.step() after every micro-step, never engine.optimizer.step(), and let the engine find the "
        "boundary; check the spelling of "
        "gradient_accumulation_steps in the JSON that reaches deepspeed.initialize",
    ),
    "boundary-shifted": Advice(
        "the optimizer steps at another micro-step than the window's last",
        "call backward and step once for each micro-batch; save and load checkpoints at boundaries only",
    ),
    "ranks-not-reduced": Advice(
        "each rank keeps its own gradient",
        "do not leave engine.no_sync() or a boundary override on at the window's last micro-step",
    ),
    "ranks-summed": Advice(
        "gradients are summed over the ranks, not averaged",
        "divide by the number of ranks once; do not multiply the loss by it",
    ),
    "ranks-averaged-twice": Advice(
        "the loss is divided by the number of ranks, and so are the gradients: they are W times too small",
        "take the division by the world size out of the loop: DeepSpeed averages over the ranks",
    ),
    "reduced-every-micro-step": Advice(
        "gradients are communicated at every micro-step: the result is right, at N times the traffic",
        "reduce at the boundary only: leave reduction to engine.backward",
    ),
    "ranks-share-data": Advice(
        "a rank is fed another rank's samples",
        "give each rank its own part: a DistributedSampler with rank and world size, or dsaccum's WindowStream",
    ),
    "samples-misplaced": Advice(
        "samples are missing, doubled, or in another window than is due",
        "compare the sampler with the rule: sample (k W + r) B + j goes to micro-step k, rank r, row j",
    ),
    "fields-misaligned": Advice(
        "a field of the batch holds other rows than input_ids",
        "slice all fields of a micro-batch by the same range",
    ),
    "mean-of-means": Advice(
        "micro-batches with different numbers of target tokens weigh the same",
        "sum the token losses and divide by the target tokens of the whole window on all ranks: feed "
        "N W (sum of losses) / (targets of the window), as dsaccum's loop does",
    ),
    "rank-mean-of-means": Advice(
        "targets are counted right on each rank, but ranks with different numbers of targets weigh the same",
        "all-reduce the window's target count before its first micro-step, and divide by it",
    ),
    "targets-counted-before-shift": Advice(
        "the divisor counts labels before the causal shift, so the first label of each row counts as a target",
        "count labels[:, 1:] != -100",
    ),
    "padding-counted": Advice(
        "the divisor counts padding as targets",
        "count labels[:, 1:] != -100, with the labels of padding set to -100",
    ),
    "stale-gradients": Advice(
        "a left-over of the window before is still in the gradient",
        "clear gradients after every optimizer step, also after a skipped or shortened window",
    ),
    "parameter-gradient-lost": Advice(
        "single parameters get no gradient, or a wrong one, while all others are right",
        "look for detach(), no_grad() or a hook on the parameters named here",
    ),
    "clipped-every-micro-step": Advice(
        "the gradient is clipped after every micro-step, not once in a window",
        'leave clipping to "gradient_clipping" in the JSON and delete clip_grad_norm_ from the micro-step',
    ),
    "clipped-before-reduction": Advice(
        "each rank clips its own gradient before the ranks are averaged",
        'leave clipping to "gradient_clipping" in the JSON: it acts after the reduction',
    ),
    "clipping-mismatch": Advice(
        "the gradient that reached the optimizer is not clipped as the JSON says",
        'state "gradient_clipping" in the JSON (left out, it means 1.0 in recent DeepSpeed versions) and nowhere else',
    ),
    "schedule-per-micro-step": Advice(
        "the learning-rate schedule advances N times for each optimizer step",
        "do not call lr_scheduler.step(): engine.step() advances it at the boundary",
    ),
    "schedule-offset": Advice(
        "the learning-rate schedule is ahead or behind by a constant number of steps",
        "do not call lr_scheduler.step() before training; restore its state when resuming",
    ),
    "rate-mismatch": Advice(
        "the learning rate used is another than the JSON asks for",
        "look for code that sets param_group['lr'], or an optimizer made outside the JSON",
    ),
    "short-window-full-divisor": Advice(
        "an epoch's short last window is divided by what a full window holds: it counts for less than its samples",
        "divide each window by the targets that it holds on all ranks; or data.last_window: continue, or drop",
    ),
    "same-seed-on-every-rank": Advice(
        "ranks draw from the same random state: their dropout masks repeat, and average out less",
        "seed each rank with its own number once the weights are drawn: torch.manual_seed(seed + 1 + rank)",
    ),
    "loss-scale-not-applied": Advice(
        "gradients are divided by a loss scale that the loss was never multiplied by",
        "fp16 at ZeRO 0: DeepSpeed does so by itself; use ZeRO 1 to 3, or bf16. In a loop of your own: "
        "engine.backward, never loss.backward",
    ),
    "loss-scale-not-removed": Advice(
        "gradients reach the optimizer still multiplied by the loss scale",
        "leave the optimizer's step to engine.step(), which unscales",
    ),
    "low-precision-accumulation": Advice(
        "gradients are added up in less precision than the config says, and small terms are lost",
        "look for a cast of gradients or of their sum between backward and step; state grad_accum_dtype in the JSON",
    ),
    "tied-weights-split": Advice(
        "weights that the model ties are trained as two",
        "tie them again (model.tie_weights()) after loading or wrapping, before deepspeed.initialize",
    ),
    "optimizer-count-offset": Advice(
        "Adam's bias correction starts at the wrong count",
        "bf16 at ZeRO 0: DeepSpeed makes an empty optimizer step at start; use ZeRO 1, or dsaccum's remedy "
        "(leave --no-remedies out)",
    ),
    "ranks-start-apart": Advice(
        "the ranks' parameters differ before the first step",
        "build the model with the same seed on every rank, and change nothing after deepspeed.initialize",
    ),
    "ranks-drift-apart": Advice(
        "the ranks' parameters come to differ while training",
        "look for updates made outside the engine, or randomness that is not the same on every rank",
    ),
    "absent-gradient-decayed": Advice(
        "parameters that get no gradient are changed by weight decay: DeepSpeed makes zeros of no gradient",
        "freeze them (requires_grad = False), or set weight_decay to 0",
    ),
    "frozen-parameter-changed": Advice(
        "parameters that are not trained are changed",
        "give deepspeed.initialize only parameters with requires_grad",
    ),
    "activations-kept": Advice(
        "tensors of earlier micro-steps stay alive: memory grows with N",
        "keep no logits or hidden states, and no loss whose backward is still to come: keep loss.detach(); do not pass "
        "retain_graph=True",
    ),
    "non-finite-gradient": Advice(
        "a gradient is not finite",
        "look at the samples of the rank and micro-step named here, and at the loss on them",
    ),
    "randomness-active": Advice(
        "gradients hold a part that no micro-batch accounts for: the same micro-batch has another loss the second time",
        "set dropout and noise to 0 for the verification, and let no forward change what the next one computes (a "
        "counter, running statistics); with them no split of a batch equals another",
    ),
    "loss-not-additive": Advice(
        "the loss is no sum over samples, so that no accumulation could equal the big batch",
        "leave the term that couples samples out (batch statistics, a contrastive term, a router's loss), or accept "
        "that its gradient depends on the micro-batch size",
    ),
    "weights-not-restored": Advice(
        "after the checkpoint was loaded, weights are not those that its files hold",
        "load every parameter, and both copies of each in low precision; in DeepSpeed load_module_strict=True and "
        "load_from_fp32_weights do. Nothing may write to them between loading and training",
    ),
    "optimizer-state-not-restored": Advice(
        "after the checkpoint was loaded, the optimizer's moments or its count are not those that its files hold",
        "load the optimizer, too: load_checkpoint(..., load_optimizer_states=True), not load_module_only=True; another "
        "number of ranks at ZeRO 1 to 3 needs a universal checkpoint",
    ),
    "schedule-not-restored": Advice(
        "the schedule begins anew where it should go on",
        "load it, too: load_checkpoint(..., load_lr_scheduler_states=True), or load_state_dict of a schedule of your "
        "own; build no second one afterwards",
    ),
    "stream-position-not-restored": Advice(
        "the stream of samples goes on at another place than where the checkpoint left it",
        "count samples, not steps: the next is sample (windows done) x E of the same order; batches that a loader has "
        "fetched in advance have not been trained on",
    ),
    UNKNOWN: Advice(
        "not equivalent, and no known signature fits: the evidence is shown as it is",
        "run it with --loop dsaccum to see whether the loop or the config is at fault",
    ),
}
