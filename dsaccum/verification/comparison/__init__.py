"""The truth of a window, and how far the run is from it: weights, gradient, update, samples, trajectory."""
