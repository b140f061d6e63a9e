"""What crosses between processes arrives as the record it was."""

import msgspec
import numpy as np

from penstock.ipc.messages import (
    EngineInfo,
    Forward,
    Ready,
    SampleTokens,
    Submit,
    ToClient,
    ToEngine,
    ToRank,
    decoder,
    encode,
)
from penstock.types.request import Grammar, Request
from penstock.types.sampling import SamplingParams
from penstock.types.setting_choice import SettingChoice
from penstock.types.step import BlockGrowth, CopyBlock, LateInputs, StepPlan, SwapIn, SwapOut


def test_choices_of_settings_arrive_as_such():
    choice = SettingChoice(name="dtype", value="float32", reason="default on a CPU")
    empty = {int: 1, bool: True, str: "cpu", dict: {}, tuple: ()}
    fields = {
        field.name: empty.get(field.type, empty[dict] if "dict" in str(field.type) else ())
        for field in msgspec.structs.fields(EngineInfo)
        if field.required
    }
    info = EngineInfo(**(fields | {"choices": (choice,)}))
    arrived = decoder(ToClient).decode(encode(Ready(info=info)))
    assert arrived == Ready(info=info) and arrived.info.choices == (choice,)


def test_cache_operations_arrive_in_order_and_as_what_they_are():
    none = np.zeros(0, np.int32)
    columns = ["dp_ranks", "rows", "starts", "num_tokens", "num_logit_rows", "max_kv_lens"]
    kinds = (SwapOut, CopyBlock, SwapIn, SwapOut)
    ops = tuple(kind(dp_rank=1, group=2, src=i, dst=9) for i, kind in enumerate(kinds))
    plan = StepPlan(
        step_id=3, joins=(), cache_ops=ops, num_decodes=0, needs_late_inputs=False,
        growth=BlockGrowth(dp_ranks=none, groups=none, rows=none, indices=none, block_ids=none),
        **dict.fromkeys(columns, none),
    )  # fmt: skip
    arrived = decoder(ToRank).decode(encode(Forward(plan=plan)))
    assert arrived.plan.step_id == 3 and arrived.plan.cache_ops == ops


def test_late_inputs_and_grammars_arrive_as_they_were():
    bitmasks = np.array([[-1, 5], [2**31 - 1, -(2**31)]], np.int32)
    late = LateInputs(positions=np.array([0, 7], np.int32), bitmasks=bitmasks)
    arrived = decoder(ToRank).decode(encode(SampleTokens(step_id=3, late=late)))
    assert arrived.step_id == 3 and arrived.late.positions.tolist() == [0, 7]
    assert arrived.late.bitmasks.dtype == np.int32
    assert np.array_equal(arrived.late.bitmasks, bitmasks)
    none = decoder(ToRank).decode(encode(SampleTokens(step_id=4, late=LateInputs())))
    assert none.late.positions.shape == (0,) and none.late.bitmasks.size == 0
    grammar = Grammar(text="start: /ü/", min_tokens=3)
    request = Request(
        id=1, prompt_ids=(1,), sampling=SamplingParams(), max_tokens=2, grammar=grammar
    )
    [arrived] = decoder(ToEngine).decode(encode(Submit(requests=(request,)))).requests
    assert arrived.grammar == grammar
