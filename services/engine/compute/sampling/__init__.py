"""From logits to tokens, row by row: a row's result depends on that row alone.

sampler.py            the order of the steps, log probabilities included
sampling_inputs.py    what each row needs, gathered per round
logit_edits.py        biases, penalties, grammar masks
truncation.py         top_k, top_p, min_p
noise.py              the random keys: a hash of seed, choice and position
"""
