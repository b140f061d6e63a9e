"""Weight-only layouts of checkpoints (AWQ, GPTQ, NVFP4 ...): several tensors become one.

A module's matrix lies in a file as packed codes, scales and more. `gathered` puts one tensor in
their place, called as the matrix would be if it were not quantized. It gives a `QuantizedWeight` of
any rectangle that does not part a group, or dequantized values.

Legend: O outputs, I inputs, G groups of inputs.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.quantized_weight import FP4_GROUP, NF4_VALUES, QuantizedWeight
from penstock.types.model_spec import WeightOnlySpec
from penstock.weights.stored import StoredTensor

Members = Mapping[str, StoredTensor]
_CPU = torch.device("cpu")
_CODES = ("U8", "I8", "F8_E4M3")  # dtypes of a `weight` that is no plain one
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word the code of each of eight outputs lies
_INT8_UNIT = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it
_STATE = "weight.quant_state.bitsandbytes__"


def gathered(
    tensors: Iterable[StoredTensor], spec: WeightOnlySpec, only: Container[str] | None = None
) -> Iterator[StoredTensor]:
    """Tensors that are no part of a quantized matrix as they come, then every quantized matrix.

    `only`: the modules that are quantized so; None: all are, where their tensors say it.
    """
    layout = _LAYOUTS[spec.layout]
    modules: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        found = layout.members.fullmatch(tensor.name)
        is_codes = found is not None and (found[2] != "weight" or tensor.dtype in _CODES)
        if found is None or not is_codes or (only is not None and found[1] not in only):
            yield tensor
        else:
            modules.setdefault(found[1], {})[found[2]] = tensor
    for module, members in modules.items():
        _need(module, members, *layout.needed)
        matrix = layout.matrix(module, members, spec)
        num_bytes = sum(member.num_bytes for member in members.values())
        yield StoredTensor(f"{module}.weight", matrix.shape, "F32", num_bytes, matrix)


def _need(module: str, members: Members, *names: str) -> None:
    for name in names:
        if name not in members:
            raise ConfigError(
                f"the checkpoint has '{next(iter(members.values())).name}', but no "
                f"'{module}.{name}' to go with it; it is not complete, or not quantized as its "
                "configuration says"
            )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """`read(rows, columns, device)` gives the codes of a rectangle of whole groups, or of any where
    a row is one; of all columns where they are not in the order of inputs."""

    name: str
    shape: tuple[int, int]
    group: int
    read: Callable[[slice, slice, torch.device], QuantizedWeight]

    def __post_init__(self) -> None:
        if self.shape[1] % self.group:
            raise ConfigError(
                f"'{self.name}' has {self.shape[1]} inputs in groups of {self.group}; only whole "
                "groups are supported"
            )

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        """Dequantized. A part that cuts through groups is taken from whole ones."""
        rows, columns = self._bounds(part)
        start = columns.start // self.group * self.group
        weight = self.read(rows, slice(start, -(-columns.stop // self.group) * self.group), _CPU)
        if weight.order_I is not None:
            start = 0
        return weight.values()[:, columns.start - start : columns.stop - start]

    def quantized(self, part: tuple[slice, ...], device: torch.device) -> QuantizedWeight | None:
        """None where the part cuts through groups of which there are several."""
        rows, columns = self._bounds(part)
        is_cut = columns.start % self.group or columns.stop % self.group
        if is_cut and self.group < self.shape[1]:
            return None
        weight = self.read(rows, columns, device)
        is_whole = columns == slice(0, self.shape[1])
        return weight if weight.order_I is None or is_whole else None

    def _bounds(self, part: tuple[slice, ...]) -> tuple[slice, slice]:
        rows, columns = (slice(*p.indices(n)[:2]) for p, n in zip(part, self.shape, strict=True))
        return rows, columns


@dataclass(frozen=True, slots=True)
class _Layout:
    members: re.Pattern[str]  # module and member of a tensor's name
    needed: tuple[str, ...]
    matrix: Callable[[str, Members, WeightOnlySpec], _Matrix]


def _unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> Tensor:
    """Codes of int32 words, the lowest bits first (or in this order), along `dim`."""
    places = torch.tensor(order or range(32 // bits), device=words.device, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> (places * bits)) & ((1 << bits) - 1)
    codes = codes.to(torch.uint8)
    return codes.flatten(-2) if dim == 1 else codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.read(tuple(slice(None) for _ in tensor.shape))


def _in_words(part: slice, per_word: int) -> tuple[slice, slice]:
    """The words that hold `part`, and which of their codes it is."""
    first, last = part.start // per_word, -(-part.stop // per_word)
    return slice(first, last), slice(part.start - first * per_word, part.stop - first * per_word)


def _by_group(columns: slice, group: int) -> slice:
    return slice(columns.start // group, -(-columns.stop // group))


def _awq(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """Codes are packed along outputs; everything is transposed."""
    qweight, qzeros, scales = (members[name] for name in ("qweight", "qzeros", "scales"))
    in_features, out_features = qweight.shape[0], scales.shape[1]
    group = spec.group or in_features

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        words, within = _in_words(rows, 8)
        groups = _by_group(columns, group)
        codes_IO, zeros_GO = (
            _unpacked(tensor.read((part, words)).to(device), 4, 1, _AWQ_ORDER)[:, within]
            for tensor, part in ((qweight, columns), (qzeros, groups))
        )
        scales_GO = scales.read((groups, rows)).to(device)
        return QuantizedWeight(
            "int4", codes_IO.t().contiguous(), scales_GO.t().contiguous(), zeros_GO.t().contiguous()
        )

    return _Matrix(module, (out_features, in_features), group, read)


def _gptq(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """Codes are packed along inputs, zero points along outputs; everything is transposed.

    With `g_idx` inputs are in groups by its numbers, not by their own.
    """
    qweight, qzeros, scales = (members[name] for name in ("qweight", "qzeros", "scales"))
    bits, per_word = spec.bits, 32 // spec.bits
    in_features, out_features = qweight.shape[0] * per_word, scales.shape[1]
    group = spec.group or in_features
    order_I = _order(members.get("g_idx"), group)

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        if order_I is not None:
            columns = slice(0, in_features)
        words, within = _in_words(columns, per_word)
        codes_IO = _unpacked(qweight.read((words, rows)).to(device), bits, 0)[within]
        if order_I is not None:
            codes_IO = codes_IO[order_I.to(device)]
        groups = _by_group(columns, group)
        words, within = _in_words(rows, per_word)
        zeros_GO = _unpacked(qzeros.read((groups, words)).to(device), bits, 1)[:, within]
        scales_GO = scales.read((groups, rows)).to(device)
        return QuantizedWeight(
            "int4" if bits == 4 else "int8",
            codes_IO.t().contiguous(),
            scales_GO.t().contiguous(),
            (zeros_GO + spec.zero_offset).t().contiguous(),
            order_I=None if order_I is None else order_I.to(device),
        )

    return _Matrix(module, (out_features, in_features), group, read)


def _order(groups: StoredTensor | None, group: int) -> Tensor | None:
    """The inputs, those of the first group first; None where that is how they are."""
    if groups is None:
        return None
    groups_I = _whole(groups).long()
    in_features = len(groups_I)
    if torch.equal(groups_I, torch.arange(in_features) // group):
        return None
    order_I = groups_I.argsort(stable=True)
    if not torch.equal(groups_I[order_I], torch.arange(in_features) // group):
        raise ConfigError(
            f"'{groups.name}' does not put {group} inputs into each group; the checkpoint is "
            "damaged, or of a layout that is not known"
        )
    return order_I


def _packed(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """compressed-tensors: codes are packed along inputs, zero points along outputs."""
    packed, scales = members["weight_packed"], members["weight_scale"]
    zeros, bits, per_word = members.get("weight_zero_point"), spec.bits, 32 // spec.bits
    out_features, in_features = (int(size) for size in _whole(members["weight_shape"]))
    num_groups = scales.shape[1] if len(scales.shape) > 1 else 1
    group = in_features // num_groups
    order_I = _order(members.get("weight_g_idx"), group)

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        if order_I is not None:
            columns = slice(0, in_features)
        words, within = _in_words(columns, per_word)
        codes_OI = _unpacked(packed.read((rows, words)).to(device), bits, 1)[:, within]
        if order_I is not None:
            codes_OI = codes_OI[:, order_I.to(device)]
        groups, zeros_OG = _by_group(columns, group), None
        if zeros is not None:
            words, within = _in_words(rows, per_word)
            stored = zeros.read((words if zeros.dtype == "I32" else rows, groups)).to(device)
            if zeros.dtype == "I32":
                zeros_OG = _unpacked(stored, bits, 0)[within]
            else:  # not packed, and with a sign
                zeros_OG = (stored.int() + (1 << (bits - 1))).to(torch.uint8)
        return QuantizedWeight(
            "int4" if bits == 4 else "int8",
            codes_OI.contiguous(),
            _expanded(scales.read((rows, groups)).to(device), codes_OI),
            zeros_OG,
            order_I=None if order_I is None else order_I.to(device),
        )

    return _Matrix(module, (out_features, in_features), group, read)


def _expanded(scales: Tensor, codes_OI: Tensor) -> Tensor:
    """A scale of a whole matrix is that of each output."""
    return scales.expand(len(codes_OI), scales.shape[-1]).contiguous()


def _modelopt(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """INT4 of ModelOpt: a byte has the signed codes of two neighboring outputs. The second scale of
    W4A8 says how codes times the first ones become FP8, which they need not: codes alone are."""
    codes, scales = members["weight"], members["weight_scale"]
    out_features, in_features = 2 * codes.shape[0], codes.shape[1]
    input_scale = None
    if "input_scale" in members:
        input_scale = _whole(members["input_scale"]).float().amax()

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        words, within = _in_words(rows, 2)
        pairs = codes.read((words, columns)).to(device)
        codes_OI = torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1)[within] ^ 8
        scales_OG = scales.read((rows, _by_group(columns, spec.group))).to(device)
        return QuantizedWeight(
            "int4",
            codes_OI,
            scales_OG.contiguous(),
            input_scale=None if input_scale is None else input_scale.to(device),
        )

    return _Matrix(module, (out_features, in_features), spec.group, read)


def _nvfp4(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """ModelOpt's names, or those of compressed-tensors, whose scale of a matrix is a divisor."""
    scales = members["weight_scale"]
    input_scale = None
    if "weight_packed" in members:
        _need(module, members, "weight_global_scale")
        codes = members["weight_packed"]
        outer = _whole(members["weight_global_scale"]).float().reciprocal()
        if "input_global_scale" in members:
            input_scale = _whole(members["input_global_scale"]).float().reciprocal()
    else:
        _need(module, members, "weight", "weight_scale_2")
        codes, outer = members["weight"], _whole(members["weight_scale_2"]).float()
        if "input_scale" in members:
            input_scale = _whole(members["input_scale"]).float()
    if input_scale is not None:
        input_scale = input_scale.amax()
    out_features, in_features = codes.shape[0], 2 * codes.shape[1]

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        halves = slice(columns.start // 2, columns.stop // 2)
        pairs = codes.read((rows, halves)).to(device)
        codes_OI = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        scales_OG = scales.read((rows, _by_group(columns, FP4_GROUP))).to(device)
        return QuantizedWeight(
            "fp4",
            codes_OI,
            scales_OG.contiguous(),
            outer_O=outer.to(device).reshape(1).expand(len(codes_OI)).contiguous(),
            input_scale=None if input_scale is None else input_scale.to(device),
        )

    return _Matrix(module, (out_features, in_features), FP4_GROUP, read)


def _mxfp4(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """compressed-tensors: scales are exponents of two, from -127 on."""
    codes, powers = members["weight_packed"], members["weight_scale"]

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        pairs = codes.read((rows, slice(columns.start // 2, columns.stop // 2))).to(device)
        codes_OI = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        powers_OG = powers.read((rows, _by_group(columns, spec.group))).to(device).int() - 127
        ones_OG = torch.ones_like(powers_OG, dtype=torch.float32)
        return QuantizedWeight("fp4", codes_OI, torch.ldexp(ones_OG, powers_OG))

    return _Matrix(module, (codes.shape[0], 2 * codes.shape[1]), spec.group, read)


def _fp8(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    """A scale for a matrix, an output, or a block of as many as a group."""
    values, scales = members["weight"], members["weight_scale"]
    out_features, in_features = values.shape
    group = spec.group or in_features

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        codes_OI = values.read((rows, columns)).to(device).contiguous().view(torch.uint8)
        found = _whole(scales).float()
        if spec.group:
            # ModelOpt's have a dimension of one behind each of both.
            found = found.view(-(-out_features // group), -(-in_features // group))
            found = found.repeat_interleave(group, dim=0)[rows, _by_group(columns, group)]
        elif found.numel() > 1:
            found = found.view(-1, 1)[rows]
        return QuantizedWeight("e4m3", codes_OI, _expanded(found.to(device), codes_OI))

    return _Matrix(module, (out_features, in_features), group, read)


def _bitsandbytes(module: str, members: Members, spec: WeightOnlySpec) -> _Matrix:
    if spec.bits == 8:
        _need(module, members, "SCB")
        return _bitsandbytes_int8(module, members)
    _need(module, members, "weight.absmax", "weight.quant_map")
    codes, absmax = members["weight"], members["weight.absmax"]
    state_name = next((name for name in members if name.startswith(_STATE)), None)
    if state_name is None:
        raise ConfigError(f"the checkpoint has no '{module}.{_STATE}nf4' to go with '{codes.name}'")
    try:
        state = json.loads(bytes(_whole(members[state_name]).tolist()))
        out_features, in_features = state["shape"]
        group = int(state["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read '{members[state_name].name}': {error!r}") from error
    table = _whole(members["weight.quant_map"]).float()
    if not torch.equal(table, torch.tensor(NF4_VALUES)) or in_features % group:
        raise ConfigError(
            f"'{codes.name}' has numbers of type {state.get('quant_type')} in blocks of {group}, a "
            f"row {in_features}; of the codes of bitsandbytes nf4 is supported, with rows of whole "
            "blocks"
        )

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        num_rows, num_groups = rows.stop - rows.start, in_features // group
        per_row = in_features // 2
        part = slice(rows.start * per_row, rows.stop * per_row)
        stored = codes.read((part, slice(None))[: len(codes.shape)]).to(device)
        pairs = stored.reshape(num_rows, per_row)[:, columns.start // 2 : columns.stop // 2]
        codes_OI = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1)
        blocks = slice(rows.start * num_groups, rows.stop * num_groups)
        scales = _absmax(members, absmax, blocks, state).to(device)
        scales_OG = scales.view(num_rows, num_groups)[:, _by_group(columns, group)]
        return QuantizedWeight("nf4", codes_OI, scales_OG.contiguous())

    return _Matrix(module, (out_features, in_features), group, read)


def _absmax(members: Members, absmax: StoredTensor, blocks: slice, state: dict) -> Tensor:
    """The scales of some blocks, which may be codes themselves."""
    stored = absmax.read((blocks,))
    if absmax.dtype != "U8":
        return stored.float()
    table = _whole(members["weight.nested_quant_map"]).float()
    outer = _whole(members["weight.nested_absmax"]).float()
    numbers = torch.arange(blocks.start, blocks.stop) // int(state["nested_blocksize"])
    return table[stored.int()] * outer[numbers] + torch.tensor(float(state["nested_offset"]))


def _bitsandbytes_int8(module: str, members: Members) -> _Matrix:
    codes, scales = members["weight"], members["SCB"]
    if "weight_format" in members and int(_whole(members["weight_format"])):
        raise ConfigError(
            f"'{codes.name}' is stored in an order for one generation of GPUs; "
            "save it with a newer bitsandbytes"
        )
    out_features, in_features = codes.shape

    def read(rows: slice, columns: slice, device: torch.device) -> QuantizedWeight:
        stored = codes.read((rows, columns)).to(device)
        scales_O = scales.read((rows,)).float().to(device)
        return QuantizedWeight(
            "int8", stored.view(torch.uint8) ^ 128, scales_O[:, None] * _INT8_UNIT
        )

    return _Matrix(module, (out_features, in_features), in_features, read)


def _members(*names: str) -> re.Pattern[str]:
    return re.compile(rf"(.+)\.({'|'.join(names)})")


_QUARTET = _members("qweight", "qzeros", "scales", "g_idx")
_LAYOUTS = {
    "awq": _Layout(_QUARTET, ("qweight", "qzeros", "scales"), _awq),
    "gptq": _Layout(_QUARTET, ("qweight", "qzeros", "scales"), _gptq),
    "packed": _Layout(
        _members("weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
                 "weight_g_idx"),
        ("weight_packed", "weight_scale", "weight_shape"),
        _packed,
    ),
    "modelopt": _Layout(
        _members("weight", "weight_scale", "weight_scale_2", "input_scale"),
        ("weight", "weight_scale"),
        _modelopt,
    ),
    "nvfp4": _Layout(
        _members("weight", "weight_packed", "weight_scale", "weight_scale_2",
                 "weight_global_scale", "input_scale", "input_global_scale"),
        ("weight_scale",),
        _nvfp4,
    ),
    "mxfp4": _Layout(
        _members("weight_packed", "weight_scale", "input_global_scale"),
        ("weight_packed", "weight_scale"),
        _mxfp4,
    ),
    "fp8": _Layout(_members("weight", "weight_scale"), ("weight", "weight_scale"), _fp8),
    "bitsandbytes": _Layout(
        _members("weight", r"weight\.absmax", r"weight\.quant_map", r"weight\.nested_absmax",
                 r"weight\.nested_quant_map", rf"{re.escape(_STATE)}\w+", "SCB", "weight_format"),
        ("weight",),
        _bitsandbytes,
    ),
}  # fmt: skip
