"""How much memory a run needs, known before it, and what would fit. No DeepSpeed here."""
