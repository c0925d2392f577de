"""Expert placement: which physical slot holds which logical expert (not request balancing)."""
