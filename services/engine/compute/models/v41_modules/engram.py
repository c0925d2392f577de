"""Look-ups by n-gram (Engram): rows of a large table, found by hashing the latest tokens.

The rows of one position make a value, and a key for each residual stream; a stream takes the value
as far as it agrees with its key.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.fixed_order import by_vectors, row_sums
from services.engine.compute.models.v41_modules.round_plan import V41Plan
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v41 import DeepseekV41Config, EngramTable
from services.engine.contract.model_config import ModelFileError

_LEAST_DOT = 1e-6


class LatestTokens:
    """Compressed ids of the tokens up to each row's own."""

    def __init__(self, config: DeepseekV41Config) -> None:
        """Raises:
        ModelFileError: the compressed ids are not those of the vocabulary.
        """
        engram = config.engram
        if len(engram.ids) != config.vocab_size:
            raise ModelFileError(
                f"engram: there are compressed ids for {len(engram.ids)} tokens, but the "
                f"vocabulary has {config.vocab_size}"
            )
        self._ids = torch.tensor(engram.ids)
        self._pad = engram.ids[engram.pad_token]

    @property
    def nbytes(self) -> int:
        """Memory of the ids, in bytes."""
        return self._ids.nbytes

    def __call__(self, plan: V41Plan, memory: Tensor) -> Tensor:
        """Ids [T, longest n-gram] int64, the latest first; the memory keeps those of this round.

        Args:
            memory: [slots, ring length] float32.
        """
        earlier = plan.earlier
        memory[earlier.slots, earlier.places] = self._ids[earlier.tokens].float()
        own = self._ids[plan.rows.token_ids].float()
        pool = plan.tokens.join(memory, own)
        plan.tokens.keep(memory, own)
        found = pool[plan.look_back].masked_fill_(plan.before, self._pad)
        return found.long().flip(1)


class Engram:
    """The look-ups of one layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        table: EngramTable,
    ) -> None:
        """Pack the weights of the tensors whose names begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, streams, dim = config.hidden_size, config.streams, config.engram.head_dim
        self._norm, self._eps = kernels.rms_norm, config.rms_norm_eps
        self._streams = streams
        self._rows = reader.rows(f"{at}.embed.weight", table.num_rows, dim)
        wide = (streams + 1) * hidden
        weight = reader(f"{at}.wkv.weight", wide, table.lookups * dim)
        self._project = kernels.pack(weight)
        names = (f"{at}.q_weight", f"{at}.k_weight")
        queries, keys = (reader(name, streams, hidden) for name in names)
        self._weight, self._ones = queries * keys, torch.ones(hidden)
        self._factors = torch.tensor(table.factors)
        self._primes = torch.tensor(table.primes)
        sizes = self._primes.flatten()
        self._offsets = (sizes.cumsum(0) - sizes).view_as(self._primes)

    @property
    def nbytes(self) -> int:
        """Memory of table and weights, in bytes."""
        return self._rows.nbytes + self._project.nbytes + self._weight.nbytes

    def __call__(self, streams: Tensor, tokens: Tensor) -> Tensor:
        """New streams [T, s, hidden] of streams [T, s, hidden].

        Args:
            tokens: compressed ids [T, longest n-gram], the latest first.
        """
        count, hidden = len(streams), streams.shape[2]
        looked_up = self._rows(self._table_rows(tokens).flatten()).float()
        parts = self._project(looked_up.view(count, -1)).view(count, self._streams + 1, hidden)
        gate = self._gate(streams, parts[:, :-1])
        return streams + gate.unsqueeze(-1) * parts[:, -1:]

    def _table_rows(self, tokens: Tensor) -> Tensor:
        """[T, n-grams, heads] int64: where each n-gram is in each head's part of the table.

        The hash of one more token is the exclusive or of the shorter one's with its product;
        products are below 2**63.
        """
        products = tokens * self._factors
        mixed, found = products[:, 0], []
        for back in range(1, products.shape[1]):
            mixed = mixed ^ products[:, back]
            found.append(mixed.unsqueeze(1) % self._primes[back - 1] + self._offsets[back - 1])
        return torch.stack(found, 1)

    def _gate(self, streams: Tensor, keys: Tensor) -> Tensor:
        """[T, s]: the share of the value that each stream takes, by streams and keys [T, s, D]."""
        width = streams.shape[-1]

        def normed(x: Tensor) -> Tensor:
            return self._norm(x.reshape(-1, width), self._ones, self._eps).view(x.shape)

        dots = row_sums(normed(streams) * self._weight * normed(keys)) * width**-0.5
        sizes = dots.abs().clamp_(min=_LEAST_DOT).sqrt_()
        return by_vectors(torch.sigmoid, sizes * dots.sign())
