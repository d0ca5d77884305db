"""What happens on a rank: the loop under test, what is captured of it, and the faults that can be planted."""
