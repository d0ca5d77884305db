"""How much the verification sees: every known fault, on real ranks, in many settings, beside the usual check."""
