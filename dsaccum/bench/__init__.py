"""``dsaccum bench``: what accumulation saves in memory and costs in time, measured over ways to split one batch."""
