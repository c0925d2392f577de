"""From logits to tokens: a row's result depends on that row alone.

sampler.py            the order of the steps, log probabilities included
sampling_inputs.py    what each row needs, gathered per round
logit_edits.py        biases, penalties, grammar masks
truncation.py         top_k, top_p, min_p
prompt_scores.py      log-probabilities of prompt tokens
batch_inputs.py       the same parameters as one array of words, for a device
batch_sampler.py      whole batches on a device, which the host does not read
noise.py              the random keys: a hash of seed, choice and position
"""
