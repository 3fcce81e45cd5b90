"""Builds programs.

A family's builder calls the methods of ``Builder`` in the order of the model's arithmetic, and gets slices of buffers;
``finish`` returns the ``Program``.

    builder = Builder(vocabulary=32000, context=2048, precision=Format.W4A8)
    x = builder.embed(Tensor("model.embed_tokens.weight", (32000, 768)))
    for layer in range(layers):
        h = builder.norm(x, Tensor("...input_layernorm.weight", (768,)), kind=Norm.RMS, epsilon=1e-6)
        qkv = builder.linear(h, [query, key, value])
        q, k, v = qkv.split(768, 768, 768)
        builder.rope(q, frequencies, heads=12)
        builder.rope(k, frequencies, heads=12)
        a = builder.attention(q, k, v, heads=12, kv_heads=12)
        x = builder.linear(a, [output], residual=x)
        ...
        m = builder.gated(h, gate, up, Activation.SILU)
        x = builder.linear(m, [down], residual=x)
    x = builder.norm(x, ...)
    program = builder.finish(builder.linear(x, [head]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from outrider.kernels.buffers import select_positions, share_buffers
from outrider.kernels.program import (
    ABSENT,
    MOST_ROUTED,
    Activation,
    Cache,
    Format,
    Kind,
    Norm,
    Op,
    Program,
    Routing,
    Slice,
    Tensor,
    Weight,
)
from outrider.kernels.weights import EACH_ITS_OWN, StorageChoice, Weights, joined

# In ``Builder.states``, beside layers.
LAST_STATE = -1


@dataclass
class Builder:
    """Collects operations. ``precision`` is the format of matrices.

    Embedding tables, keys and values are bf16, or fp32 where activations are. Quantised matrices have a scale for every
    ``group`` channels; 0 is the format's default: FACTORS for four bits, groups of 128 for eight.

    ``states`` are the layers whose inputs a pass returns; LAST_STATE is the last layer's output, before the last norm.

    ``storage_choice`` decides how each matrix and table of a quantised checkpoint is stored. Of several matrices only
    neighbours that are stored alike are stacked as one weight, which computes its part of the output.
    """

    vocabulary: int
    context: int
    precision: Format
    group: int = 0
    storage_choice: StorageChoice | None = None
    states: Sequence[int] = ()
    _weights: Weights = field(init=False)
    _ops: list[Op] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)
    _caches: dict[tuple[Slice, Slice], int] = field(default_factory=dict)
    _hidden_out: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._weights = Weights(self.precision, self.group, self.storage_choice)

    def embed(self, table: Tensor, scale: float = 1.0) -> Slice:
        """The token's row of ``table``, times ``scale``."""
        output = self._buffer(table.shape[1])
        self._ops.append(Op(Kind.EMBED, output=output, weight=self._weights.table(table, packed=True), scale=scale))
        return output

    def positions(self, x: Slice, table: Tensor, offset: int = 0) -> Slice:
        """``x`` plus the row of ``table`` at the token's position + ``offset`` (OPT's is 2)."""
        output = self._buffer(x.width)
        self._ops.append(Op(Kind.POSITION, x, output=output, weight=self._weights.table(table), integer=offset))
        return output

    def norm(
        self,
        x: Slice,
        weight: Tensor | None,
        *,
        kind: Norm,
        epsilon: float,
        bias: Tensor | None = None,
        residual: Slice | None = None,
        output: Slice | None = None,
    ) -> Slice:
        """``norm(x) * weight + bias + residual``, in ``output`` if given. Without a ``weight`` its elements are 1."""
        output = output or self._buffer(x.width)
        self._ops.append(
            Op(
                Kind.NORM,
                x,
                residual=residual or ABSENT,
                output=output,
                weight=self._weights.vector([weight]) if weight else self._weights.constants([1.0] * x.width),
                bias=self._weights.vector([bias]) if bias else -1,
                integer=kind,
                head_size=x.width,
                epsilon=epsilon,
            )
        )
        return output

    def head_norm(
        self,
        x: Slice,
        weight: Tensor | None,
        *,
        heads: int,
        epsilon: float,
        kind: Norm = Norm.RMS,
        bias: Tensor | None = None,
        residual: Slice | None = None,
        output: Slice | None = None,
    ) -> None:
        """A norm of every head by itself, in place (Qwen3's queries and keys); with one head, of the whole width.

        Without a ``weight`` its elements are 1. ``residual`` is added. If ``output`` is given, the result goes there.
        """
        gain = self._weights.vector([weight]) if weight else self._weights.constants([1.0] * (x.width // heads))
        op = Op(Kind.NORM, x, residual=residual or ABSENT, output=output or x, weight=gain, heads=heads, epsilon=epsilon)
        shift = self._weights.vector([bias]) if bias else -1
        self._ops.append(replace(op, integer=kind, head_size=x.width // heads, bias=shift))

    def scale_by_position(self, x: Slice, factors: Sequence[float], every: int, ahead: int = 0) -> None:
        """``x * factors[min((position + ahead) // every, len(factors) - 1)]``, in place."""
        self._ops.append(Op(Kind.SCALE, x, output=x, weight=self._weights.constants(factors), window=every, integer=ahead))

    def xielu(self, x: Slice, numbers: Sequence[Tensor]) -> Slice:
        """p x^2 + b x where x is positive, else (e^min(x, c) - 1 - x) n + b x.

        ``numbers`` are v, w, b and c, with p = softplus(v) and n = b + softplus(w).
        """
        output = self._buffer(x.width)
        self._ops.append(Op(Kind.XIELU, x, output=output, weight=self._weights.vector(numbers)))
        return output

    def scale(
        self, x: Slice, factor: Tensor | float, *, residual: Slice | None = None, output: Slice | None = None
    ) -> Slice:
        """``x * factor + residual``, in ``output`` if given. The factor is a constant, or one element of the checkpoint."""
        output = output or self._buffer(x.width)
        weight = self._weights.constants([factor]) if isinstance(factor, float) else self._weights.vector([factor])
        self._ops.append(Op(Kind.SCALE, x, residual=residual or ABSENT, output=output, weight=weight))
        return output

    def scale_columns(self, x: Slice, factors: Tensor | Sequence[float]) -> Slice:
        """``x``, each column times its own factor."""
        output = self._buffer(x.width)
        if isinstance(factors, Tensor):
            count, weight = factors.count, self._weights.vector([factors])
        else:
            count, weight = len(factors), self._weights.constants(factors)
        if count != x.width:
            raise ValueError(f"{count} factors for {x.width} columns")
        self._ops.append(Op(Kind.SCALE, x, output=output, weight=weight, integer=1))
        return output

    def spread(self, x: Slice, vector: Tensor | Sequence[float]) -> Slice:
        """``vector`` for every token, computed as a layer norm of ``x``, any finite numbers, with weights of 0."""
        output, zeros = self._buffer(x.width), self._weights.constants([0.0] * x.width)
        bias = self._weights.vector([vector]) if isinstance(vector, Tensor) else self._weights.constants(vector)
        op = Op(Kind.NORM, x, output=output, weight=zeros, bias=bias, integer=Norm.LAYER)
        self._ops.append(replace(op, head_size=x.width, epsilon=1.0))
        return output

    def shift(self, x: Slice, vector: Tensor) -> Slice:
        """``x + vector``, computed as a layer norm with weights of 0 and the bias ``vector``, plus the residual ``x``."""
        output = self._buffer(x.width)
        zeros, bias = self._weights.constants([0.0] * x.width), self._weights.vector([vector])
        op = Op(Kind.NORM, x, residual=x, output=output, weight=zeros, bias=bias, integer=Norm.LAYER)
        self._ops.append(replace(op, head_size=x.width, epsilon=1.0))
        return output

    def gaussian_top_k(self, x: Slice, deviations: float) -> None:
        """``max(0, x - (mean(x) + deviations * standard deviation of x))``, in place."""
        self._ops.append(Op(Kind.GAUSSIAN_TOP_K, x, output=x, scale=deviations))

    def blend(self, x: Slice, coefficients: Slice, *, vectors: int, residual: Slice | None = None) -> Slice:
        """Linear combinations of the concatenated ``vectors`` in ``x``, plus ``residual``.

        Sum s is sum over v of coefficients[s][v] * x[v]. Each token has ``coefficients`` [sums, vectors] of its own.
        """
        width, sums = x.width // vectors, coefficients.width // vectors
        if x.width % vectors or coefficients.width % vectors:
            raise ValueError(f"{coefficients.width} coefficients of {vectors} vectors in {x.width} columns")
        output = self._buffer(sums * width)
        op = Op(Kind.BLEND, x, key=coefficients, residual=residual or ABSENT, output=output, heads=vectors)
        self._ops.append(op)
        return output

    def match_rms(
        self, x: Slice, model: Slice, *, epsilon: float, residual: Slice | None = None, output: Slice | None = None
    ) -> Slice:
        """The concatenated vectors in ``x``, each rescaled to the root mean square of ``model``, plus ``residual``.

        Vector v becomes x[v] * sqrt(mean(model^2) / max(mean(x[v]^2), epsilon)).
        """
        if x.width % model.width:
            raise ValueError(f"vectors of {model.width} columns in {x.width}")
        output, vectors = output or self._buffer(x.width), x.width // model.width
        op = Op(Kind.MATCH_RMS, x, key=model, residual=residual or ABSENT, output=output, heads=vectors, epsilon=epsilon)
        self._ops.append(op)
        return output

    def connect(
        self,
        logits: Slice,
        factors: Tensor,
        biases: Tensor,
        *,
        streams: int,
        epsilon: float,
        most: float = 1.0,
        least: float = 0.0,
        rounds: int = 1,
    ) -> Slice:
        """The weights of hyper-connections, from their logits: by which ``streams`` are read, then (or not) by which they
        are written, then (or not) those by which they are mixed, as ``blend``'s coefficients.

        With x = logits * the part's factor + biases: sigmoid(x) + epsilon, most * sigmoid(x) + least, and softmax(x) of
        each row + epsilon, divided by its columns' sums and, ``rounds`` - 1 times, its rows' and its columns' sums again
        (Sinkhorn). outrider_kernels.h has the formula.
        """
        output = self._buffer(logits.width)
        op = Op(Kind.CONNECT, logits, output=output, heads=streams, integer=rounds, epsilon=epsilon, scale=most, cap=least)
        if factors.count != len(op.connections) or biases.count != logits.width:
            raise ValueError(
                f"{factors.count} factors and {biases.count} biases of {streams} streams' {logits.width} logits"
            )
        self._ops.append(replace(op, weight=self._weights.vector([factors, biases])))
        return output

    def linear(
        self,
        x: Slice,
        matrices: Sequence[Tensor],
        *,
        biases: Sequence[Tensor] = (),
        shift: float = 0.0,
        activation: Activation = Activation.NONE,
        residual: Slice | None = None,
        precision: Format | None = None,
        scale: float = 1.0,
        cap: float = 0.0,
        output: Slice | None = None,
    ) -> Slice:
        """``soft_cap(activation(x W^T + b)) * scale + residual``, with W the stacked ``matrices``; in ``output`` if given.

        Without ``biases`` all elements of b are ``shift``. soft_cap(y) = cap * tanh(y / cap), or y if ``cap`` is 0; of the
        activation CLIP ``cap`` is the bound.
        """
        _check_columns(x.width, matrices)
        output = output or self._buffer(sum(matrix.count for matrix in matrices))
        if biases and len(biases) != len(matrices):
            raise ValueError(f"{len(biases)} biases for {len(matrices)} matrices")
        first = 0
        for kept, run in groupby(range(len(matrices)), lambda index: self._weights.kept_as(matrices[index], precision)):
            indices = list(run)
            stacked = [matrices[index] for index in indices]
            width = sum(matrix.count for matrix in stacked)
            constant = self._weights.constants([shift] * width) if shift else -1
            self._ops.append(
                Op(
                    Kind.LINEAR,
                    x,
                    residual=residual.part(first, width) if residual else ABSENT,
                    output=output.part(first, width),
                    weight=self._weights.matrix(stacked, kept, gated=False),
                    bias=self._weights.vector([biases[index] for index in indices]) if biases else constant,
                    activation=activation,
                    scale=scale,
                    cap=cap,
                )
            )
            first += width
        return output

    def gated(
        self,
        x: Slice,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        *,
        biases: Sequence[Tensor] = (),
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> Slice:
        """``activation(x G^T + b) * (x U^T + c)``; ``biases`` are b and c, ``scale`` that of a clamped activation.

        With a ``cap`` the gate is at most that, and the other factor, too, and at least -cap, before the activation; of
        BOUNDED_SILU the gate is so behind it."""
        if gate.count != up.count:
            raise ValueError(f"{gate.name} has {gate.count} rows, {up.name} {up.count}")
        _check_columns(x.width, [gate, up])
        kept = joined({self._weights.kept_as(gate, None), self._weights.kept_as(up, None)})
        if kept is None:
            raise ValueError(f"{gate.name} and {up.name} are quantised in different ways, which the kernels cannot join")
        output = self._buffer(gate.count)
        weight = self._weights.matrix([gate, up], kept, gated=True)
        bias = self._weights.vector(biases) if biases else -1
        op = Op(Kind.LINEAR, x, output=output, weight=weight, bias=bias, activation=activation, scale=scale, cap=cap)
        self._ops.append(op)
        return output

    def rope(
        self,
        x: Slice,
        frequencies: Sequence[float],
        *,
        heads: int,
        factor: float = 1.0,
        long_frequencies: Sequence[float] = (),
        longest: int = 0,
    ) -> None:
        """Rotates column i of every head with column i + n, in place; i < n, the number of frequencies.

        ``factor`` multiplies sine and cosine (yarn's attention factor). Rows of more than ``longest`` tokens (0: none) use
        the long frequencies, for all of their tokens.
        """
        head_size = x.width // heads
        if 2 * len(frequencies) > head_size or (longest and len(long_frequencies) != len(frequencies)):
            raise ValueError(f"{len(frequencies)} and {len(long_frequencies)} frequencies for heads of {head_size}")
        weight = self._weights.constants(frequencies)
        long = self._weights.constants(long_frequencies) if longest else -1
        op = Op(Kind.ROPE, x, output=x, weight=weight, bias=long, heads=heads, head_size=head_size, scale=factor)
        self._ops.append(replace(op, rotated=2 * len(frequencies), longest=longest))

    def attention(
        self,
        query: Slice,
        key: Slice,
        value: Slice,
        *,
        heads: int,
        kv_heads: int,
        scale: float | None = None,
        window: int = 0,
        chunk: int = 0,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        slopes: Sequence[float] = (),
        bf16_biases: bool = False,
    ) -> Slice:
        """Causal attention over the row's KV cache, in which the keys and values are stored. Each call has a cache of its
        own; calls with the same key and value share one.

        A head's values may be of another size than its keys. A token attends to the last ``window`` tokens, itself
        included, or with ``chunk`` to those of its chunk of that many tokens.

        ``cap`` (0: none) is the soft cap of scores; ``sinks`` are the scores of an attention sink for each head.
        ``slopes`` are ALiBi's: slope * (the key's position - the query's) is added to a scaled score. ``bf16_biases``:
        instead, b(the key's) - b(the query's) is added before scores are scaled, where b(p) = bf16(slope * bf16(p)).
        """
        head_size = query.width // heads
        value_size = value.width // kv_heads
        sizes = (kv_heads * head_size, kv_heads * value_size)
        if head_size % 8 or value_size % 8 or (key.width, value.width) != sizes or heads % kv_heads:
            raise ValueError(
                f"attention of {heads}/{kv_heads} heads over {query.width}, {key.width}, {value.width} columns"
            )
        if slopes and (len(slopes) != heads or cap):
            raise ValueError(f"{len(slopes)} slopes for attention of {heads} heads with a cap of {cap:g}")
        output = self._buffer(heads * value_size)
        cache = self._caches.setdefault((key, value), len(self._caches))
        self._ops.append(
            Op(
                Kind.ATTENTION,
                query,
                key,
                value,
                output=output,
                weight=self._weights.vector([sinks]) if sinks else -1,
                bias=self._weights.constants(slopes) if slopes else -1,
                integer=cache,
                heads=heads,
                kv_heads=kv_heads,
                head_size=head_size,
                window=-chunk if chunk else window,
                rotated=int(bf16_biases),
                scale=head_size**-0.5 if scale is None else scale,
                cap=cap,
            )
        )
        return output

    def heads(self, x: Slice, matrices: Sequence[Tensor]) -> Slice:
        """For each head the product of its columns with a matrix of its own.

        Where a head has more columns than its matrix, the last ones are multiplied, and the columns before them are copied,
        before the product.
        """
        count, first = len(matrices), matrices[0]
        kept_columns = x.width // count - first.columns
        if (
            x.width % count
            or kept_columns < 0
            or {(each.count, each.columns) for each in matrices} != {(first.count, first.columns)}
        ):
            raise ValueError(f"{count} heads like {first.name} over {x.width} columns")
        kept = joined({self._weights.kept_as(matrix, None) for matrix in matrices})
        if kept is None:
            raise ValueError(f"heads of {first.name} are kept in different ways, which cannot be joined")
        numbers = [self._weights.matrix([matrix], kept, gated=False) for matrix in matrices]
        if numbers != list(range(numbers[0], numbers[0] + count)):
            raise ValueError(f"heads of {first.name} share weights")
        output = self._buffer(count * (kept_columns + first.count))
        self._ops.append(Op(Kind.HEADS, x, output=output, weight=numbers[0], heads=count))
        return output

    def convolve(
        self,
        x: Slice,
        taps: Tensor,
        *,
        before: Slice | None = None,
        behind: Slice | None = None,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
    ) -> Slice:
        """A causal depthwise convolution over a row's tokens: ``activation(conv(x * before) + bias) * behind``.

        ``taps`` are [columns, 1, taps]; the last tap is the token's own. ``x`` is overwritten by ``x * before``.
        """
        if len(taps.shape) != 3 or taps.count != x.width or taps.shape[1] != 1:
            raise ValueError(f"{taps.name} has shape {taps.shape}, its input has {x.width} columns")
        output = self._buffer(x.width)
        weight = self._weights.add(Weight(Format.FP32, taps.count, taps.shape[2], (taps,), table=True))
        shift = self._weights.vector([bias]) if bias else -1
        op = Op(Kind.CONVOLVE, x, before or ABSENT, behind or ABSENT, output=output, weight=weight, bias=shift)
        self._ops.append(replace(op, activation=activation))
        return output

    def delta(
        self,
        query: Slice,
        key: Slice,
        value: Slice,
        gates: Slice,
        *,
        decay: Tensor,
        shift: Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float = 1e-6,
        most: float = 1.0,
        bound: float = 0.0,
    ) -> Slice:
        """The gated delta rule, in fp32 (outrider_kernels.h has the formula). Each head has a recurrent state, which a
        truncation of the row does not restore.

        ``gates`` are b and a of all heads, ``decay`` and ``shift`` are A_log and dt_bias of checkpoints; a and ``shift``
        have a number for each head, or for each row of a head's state. beta = most * sigmoid(b). ``bound`` (0:
        none): decays are at least exp(-bound). The inputs are overwritten.
        """
        size, columns = query.width // kv_heads, value.width // heads
        if columns % 16 or heads % kv_heads or (query.width, value.width) != (kv_heads * size, heads * columns):
            raise ValueError(f"the delta rule with {heads}/{kv_heads} heads over {query.width} and {value.width} columns")
        if (gates.width, shift.count) not in ((2 * heads, heads), (heads * (1 + size), heads * size)):
            raise ValueError(f"the delta rule with {heads} heads of {size} rows, {gates.width} gates")
        output = self._buffer(value.width)
        numbers = (self._weights.vector([decay]), self._weights.vector([shift]))
        if bound and most != 1.0:
            raise ValueError(f"the delta rule with a beta of up to {most:g} and decays of at least exp(-{bound:g})")
        op = Op(Kind.DELTA, query, key, value, gates, output, *numbers, heads=heads, kv_heads=kv_heads, head_size=size)
        cap = bound or (0.0 if most == 1.0 else most)
        self._ops.append(replace(op, epsilon=epsilon, scale=size**-0.5, cap=cap, window=int(bound > 0.0)))
        return output

    def scan(
        self,
        query: Slice,
        key: Slice,
        value: Slice,
        steps: Slice,
        *,
        decay: Tensor,
        skip: Tensor,
        shift: Tensor,
        heads: int,
        kv_heads: int,
    ) -> Slice:
        """The scan of Mamba, in fp32 (outrider_kernels.h has the formula). Each head has a recurrent state, which a
        truncation of the row does not restore.

        ``query``, ``key`` and ``value`` are C, B and x of its authors, ``steps`` are dt of all heads (Mamba 2) or of all
        columns (Mamba 1), and ``decay``, ``skip`` and ``shift`` are A_log, D and dt_bias of checkpoints. Values and steps
        are overwritten.
        """
        size, columns = query.width // kv_heads, value.width // heads
        if columns % 16 or heads % kv_heads or (query.width, value.width) != (kv_heads * size, heads * columns):
            raise ValueError(f"a scan with {heads}/{kv_heads} heads over {query.width} and {value.width} columns")
        output = self._buffer(value.width)
        if steps.width == heads:
            numbers = (self._weights.vector([decay, skip]), self._weights.vector([shift]))
        elif decay.shape == (value.width, size) and steps.width == skip.count == shift.count == value.width:
            rates = Weight(Format.FP32, value.width, size, (decay,), table=True)
            numbers = (self._weights.add(rates), self._weights.vector([shift, skip]))
        else:
            raise ValueError(f"a scan with {steps.width} steps of {value.width} columns, decays {decay.shape}")
        op = Op(Kind.SCAN, query, key, value, steps, output, *numbers, heads=heads, kv_heads=kv_heads, head_size=size)
        self._ops.append(op)
        return output

    def route(
        self,
        scores: Slice,
        chosen: int,
        routing: Routing,
        *,
        corrections: Tensor | None = None,
        factors: Tensor | None = None,
        groups: int = 1,
        groups_kept: int = 1,
        epsilon: float = 0.0,
        scale: float = 1.0,
    ) -> Slice:
        """The indices of a token's ``chosen`` best experts, best first (ties by index), then their weights.

        Weights, with p = softmax over all experts' scores and q = sigmoid(score):

            SOFTMAX, SOFTMAX_GROUPS   p
            SOFTMAX_CHOSEN            softmax over the chosen experts' scores
            SIGMOID_EACH              q
            SIGMOID_SHARE             q / (sum of the chosen experts' q + epsilon)
            SIGMOID_.._BY_SCORE       as these two
            SOFTMAX_SHARE             p / max(epsilon, sum of the chosen experts' p)
            SPARSE_MIXER              Phi's (kernels/src/elementwise.inc), with ``epsilon`` twice its jitter

        With SIGMOID_EACH, SIGMOID_SHARE and SOFTMAX_SHARE experts are chosen by q (or p) + ``corrections``, from the best
        ``groups_kept`` of ``groups`` by the sum of a group's best two; with SOFTMAX_GROUPS from the best groups by their
        best expert; with BY_SCORE, without groups, by score + ``corrections``. Weights are multiplied by ``scale``, and by
        the element of ``factors`` for the expert.
        """
        experts = scores.width
        size = experts // groups if groups_kept < groups else 0
        if routing > Routing.SOFTMAX_CHOSEN and experts > MOST_ROUTED:
            raise ValueError(f"{experts} experts are more than {MOST_ROUTED}")
        if size and (size < 2 or experts % groups or chosen > groups_kept * size):
            raise ValueError(f"{chosen} of {experts} experts cannot be chosen from {groups_kept} of {groups} groups")
        output = self._buffer(2 * chosen)
        op = Op(Kind.ROUTE, scores, output=output, heads=experts, kv_heads=chosen, integer=int(routing))
        if corrections is not None:
            op = replace(op, weight=self._weights.vector([corrections]))
        if factors is not None:
            op = replace(op, bias=self._weights.vector([factors]))
        self._ops.append(replace(op, head_size=size, window=groups_kept if size else 0, epsilon=epsilon, scale=scale))
        return output

    def experts(
        self,
        x: Slice,
        route: Slice,
        matrices: Sequence[Sequence[Tensor]],
        *,
        biases: Sequence[Sequence[Tensor]] = (),
        gated: bool = False,
        behind: bool = False,
        activation: Activation = Activation.NONE,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> Slice:
        """The concatenated products with the matrices (or gate and up) of each of a token's experts.

        ``behind``: ``x`` is the output of another ``experts``, which has a vector for each of a token's experts. ``scale``
        and ``cap`` are ``gated``'s.
        """
        chosen, width = route.width // 2, sum(part.count for part in matrices[0]) // (2 if gated else 1)
        each = [{self._weights.kept_as(part, None) for part in parts} for parts in matrices]
        # An expert may have an activation order of its own, which all of its matrices with the same input share.
        ordered = any(kept.order for alike in each for kept in alike)
        alike = {replace(kept, order=EACH_ITS_OWN if ordered else "") for kinds in each for kept in kinds}
        kept = None if any(len({kept.order for kept in kinds}) > 1 for kinds in each) else joined(alike)
        if kept is None:
            raise ValueError(
                f"{matrices[0][0].name} and other experts are quantised in different ways, which the kernels cannot join; "
                "--precision bf16 runs them"
            )
        output = self._buffer(chosen * _rounded(width))
        numbers = [self._weights.matrix(parts, kept, gated=gated) for parts in matrices]
        shifts = [self._weights.vector(parts) for parts in biases]
        for found in (numbers, shifts):
            if found != list(range(found[0], found[0] + len(found))) if found else False:
                raise ValueError(f"the experts beside {matrices[0][0].name} share weights")
        self._ops.append(
            Op(
                Kind.EXPERTS,
                x,
                key=route,
                output=output,
                weight=numbers[0],
                bias=shifts[0] if shifts else -1,
                activation=activation,
                integer=int(behind),
                heads=len(matrices),
                kv_heads=chosen,
                scale=scale,
                cap=cap,
            )
        )
        return output

    def mix(
        self,
        products: Slice,
        route: Slice,
        width: int,
        *,
        residual: Slice | None = None,
        scale: float = 1.0,
        weighed: bool = True,
        idle: Slice | None = None,
        experts: int = 1,
        gain: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> Slice:
        """``sum over a token's experts of (weight * product) * scale + residual``.

        Not ``weighed``: all weights are 1. ``idle``: the vector that stands for the product of experts beyond the first
        ``experts``, which have none. ``gain``: each product is multiplied by this vector, and then has an RMS norm without
        weights.
        """
        output, chosen = self._buffer(width), route.width // 2
        if idle is not None and idle.width != width:
            raise ValueError(f"idle experts give {idle.width} columns of {width}")
        if products.width != chosen * _rounded(width):
            raise ValueError(f"{chosen} products of {width} columns in {products.width}")
        op = Op(Kind.MIX, products, key=route, residual=residual or ABSENT, output=output, kv_heads=chosen, scale=scale)
        op = replace(op, value=idle or ABSENT, heads=experts)
        if gain is not None:
            ones = self._weights.constants([1.0] * width)
            op = replace(op, weight=self._weights.vector([gain]), bias=ones, epsilon=epsilon)
        self._ops.append(replace(op, integer=0 if weighed else 1))
        return output

    def gate(
        self,
        x: Slice,
        key: Slice,
        *,
        residual: Slice | None = None,
        activation: Activation = Activation.SIGMOID,
        output: Slice | None = None,
    ) -> Slice:
        """``x * activation(key) + residual``, in ``output`` if given.

        ``key`` is as wide as ``x``, or has one column.
        """
        output = output or self._buffer(x.width)
        self._ops.append(Op(Kind.GATE, x, key=key, residual=residual or ABSENT, output=output, activation=activation))
        return output

    def room(self, width: int) -> Slice:
        """A new buffer that several operations fill."""
        return self._buffer(width)

    def layer_input(self, layer: int, x: Slice) -> None:
        """Declares ``x``, the residual, as the layer's input, which passes return if ``states`` has the layer."""
        for place, wanted in enumerate(self.states):
            if wanted == layer:
                self._hidden_out.add(place)
                self._ops.append(Op(Kind.HIDDEN_OUT, x, integer=place * x.width))

    def hidden_in(self, width: int) -> Slice:
        """The hidden state that was given with the token. ``load_hidden`` must follow."""
        output = self._buffer(width)
        self._ops.append(Op(Kind.HIDDEN_IN, output=output))
        return output

    def load_hidden(self, x: Slice) -> Slice:
        """``x`` if the token was given a state, else what ``store_hidden`` stored for the row's last token."""
        output = self._buffer(x.width)
        self._ops.append(Op(Kind.LOAD_HIDDEN, x, output=output))
        return output

    def store_hidden(self, x: Slice) -> None:
        """Stores ``x`` of a row's last token, for ``load_hidden`` of the next one. Must follow the last attention."""
        self._ops.append(Op(Kind.STORE_HIDDEN, x))

    def scatter(self, logits: Slice, tokens: Sequence[int]) -> Slice:
        """The logits of the whole vocabulary, from those of ``tokens``; no other token is ever chosen."""
        output = self._buffer(self.vocabulary)
        weight = self._weights.constants([float(token) for token in tokens])
        self._ops.append(Op(Kind.SCATTER, logits, output=output, weight=weight))
        return output

    def finish(self, logits: Slice) -> Program:
        """The program that ends with a choice from ``logits``."""
        if logits.width != self.vocabulary:
            raise ValueError(f"{logits.width} logits for a vocabulary of {self.vocabulary}")
        self._return_last_state()
        if missing := [layer for place, layer in enumerate(self.states) if place not in self._hidden_out]:
            raise ValueError(f"the inputs of layers {missing} cannot be returned")
        if self.states and any(op.longest for op in self._ops):
            raise ValueError("the inputs of layers cannot be returned where rope depends on how long a row is")
        self._ops.append(Op(Kind.CHOOSE, logits))
        ops, buffers = share_buffers(*select_positions(self._ops, self._widths))
        cache = Cache.FP32 if self.precision.fp32 else Cache.BF16
        return Program(ops, tuple(self._weights.all), buffers, len(self._caches), self.vocabulary, self.context, cache)

    def store_last(self) -> None:
        """``store_hidden`` of the input of the LM head, which must have been added."""
        self._insert_before(Kind.LINEAR, Kind.STORE_HIDDEN)

    def _return_last_state(self) -> None:
        for place, wanted in enumerate(self.states):
            if wanted == LAST_STATE:
                self._hidden_out.add(place)
                self._insert_before(Kind.NORM, Kind.HIDDEN_OUT, place)

    def _insert_before(self, last: Kind, kind: Kind, place: int = 0) -> None:
        """Adds an operation on the input of the last operation of the kind ``last``, before it."""
        at = max(index for index, op in enumerate(self._ops) if op.kind is last)
        state = self._ops[at].input
        self._ops.insert(at, Op(kind, state, integer=place * state.width))

    def _buffer(self, width: int) -> Slice:
        self._widths.append(width)
        return Slice(len(self._widths) - 1, 0, width)


def _rounded(width: int) -> int:
    """The columns from one product of a token to the next: ``width`` rounded up to a multiple of 16."""
    return -(-width // 16) * 16


def _check_columns(columns: int, parts: Sequence[Tensor]) -> None:
    for part in parts:
        if len(part.shape) != 2 or part.columns != columns:
            raise ValueError(f"{part.name} has shape {part.shape}, its input has {columns} columns")
