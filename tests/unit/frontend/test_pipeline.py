"""A prompt goes in, text deltas come out; whatever ends early is aborted in the engine."""

import asyncio
import itertools
from dataclasses import replace

import pytest
import tiny_tokenizers
from fake_engine import make_info, say

from penstock.errors import CapacityError, RequestError
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.rendering import TemplateProcess, TemplateTexts
from penstock.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer
from penstock.types.outputs import TokenDelta, TokenLogprob
from penstock.types.request import ChatOptions, FinishReason, GenerateInput
from penstock.types.sampling import SamplingParams

ENDLESS = say(itertools.cycle(range(40, 60)))


def ask(text="hello world", **params):
    return GenerateInput(text=text, add_special_tokens=False, sampling=SamplingParams(**params))


async def collect(generation):
    """Per sample: text, number of tokens, number of deltas, finish, stop reason."""
    found = {}
    async for delta in generation:
        text, tokens, deltas, *_ = found.get(delta.index, ("", 0, 0))
        assert len(found.get(delta.index, ())) != 5 or found[delta.index][3] is None
        tokens += len(delta.token_ids)
        found[delta.index] = (
            text + delta.text,
            tokens,
            deltas + 1,
            delta.finish,
            delta.stop_reason,
        )
    return [found[index] for index in sorted(found)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_text_in_text_out(serve, run):
    async def scenario():
        async with serve() as (pipeline, engine):
            generation = await pipeline.generate(ask(max_tokens=9))
            assert generation.prompt_text == "hello world"
            assert generation.num_samples == 1
            [(text, tokens, deltas, finish, _)] = await collect(generation)
            sent = engine.submitted()[0].prompt_ids
            assert sent.tolist() == generation.prompt_ids.tolist()
            assert (tokens, deltas, finish) == (9, 9, FinishReason.LENGTH)
            assert (text * 2).startswith("hello worldhello")

    run(scenario())


def test_messages_are_rendered_and_token_ids_taken_as_they_are(serve, run, tokenizer):
    async def scenario():
        async with serve() as (pipeline, _):
            messages = ({"role": "user", "content": "hi"},)
            chat = GenerateInput(messages=messages, add_special_tokens=False)
            ids, text = await pipeline.tokenize(chat)
            assert text == "<s>[user]hi[assistant]"
            assert ids == tuple(tokenizer.encode(text, add_special_tokens=False))
            assert await pipeline.tokenize(GenerateInput(token_ids=(1, 2))) == ((1, 2), None)
            assert await pipeline.detokenize(ids) == text
            assert await pipeline.detokenize(ids, skip_special_tokens=True) == "[user]hi[assistant]"

    run(scenario())


def test_long_text_is_encoded_like_short_text(serve, run, tokenizer):
    async def scenario():
        async with serve(info=make_info(max_seq_len=100_000)) as (pipeline, _):
            long = ask("hello world " * 2000)
            ids, _ = await pipeline.tokenize(long)
            assert ids == tuple(tokenizer.encode(long.text, add_special_tokens=False))

    run(scenario())


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (GenerateInput(), "invalid_value"),
        (GenerateInput(text="a", token_ids=(1,)), "invalid_value"),
        (GenerateInput(text="", add_special_tokens=False), "invalid_value"),
        (GenerateInput(token_ids=(10_000,)), "invalid_value"),
        (GenerateInput(text="ab" * 4000), "context_length_exceeded"),
        (GenerateInput(text="a" * (4096 * MAX_CHARS_PER_TOKEN + 1)), "context_length_exceeded"),
        (GenerateInput(messages=()), "invalid_value"),
    ],
)
def test_bad_prompts_never_reach_the_engine(serve, run, given, code):
    async def scenario():
        async with serve() as (pipeline, engine):
            with pytest.raises(RequestError) as caught:
                await pipeline.generate(given)
            assert caught.value.code == code
            assert engine.submitted() == []
            assert pipeline.client.num_open == 0

    run(scenario())


def test_messages_without_a_template_name_the_way_out(serve, run):
    async def scenario():
        async with serve() as (pipeline, _):
            bare = GenerationPipeline(pipeline.client, pipeline.tokenizer, None)
            chat = GenerateInput(messages=({"role": "user", "content": "hi"},))
            with pytest.raises(RequestError, match="--chat_template"):
                await bare.generate(chat)

    run(scenario())


def test_without_a_tokenizer_ids_go_in_and_come_out(serve, run):
    async def scenario():
        async with serve(with_tokenizer=False) as (pipeline, _):
            given = GenerateInput(token_ids=(7, 8), sampling=SamplingParams(max_tokens=3))
            deltas = [delta async for delta in await pipeline.generate(given)]
            assert [delta.token_ids for delta in deltas] == [(7,), (8,), (7,)]
            assert {delta.text for delta in deltas} == {""}
            for wrong in (ask(), GenerateInput(token_ids=(7,), sampling=SamplingParams(stop="x"))):
                with pytest.raises(RequestError, match="runs without one"):
                    await pipeline.generate(wrong)
            with pytest.raises(RequestError, match="runs without one"):
                await pipeline.detokenize((1,))

    run(scenario())


def test_stop_string_ends_the_sample_and_aborts_it_in_the_engine(serve, run, tokenizer):
    async def scenario():
        words = tokenizer.encode("one two STOP three", add_special_tokens=False)
        async with serve(say(itertools.cycle(words))) as (pipeline, engine):
            generation = await pipeline.generate(ask(stop=("STOP",)))
            [(text, tokens, _, finish, reason)] = await collect(generation)
            assert (text, finish, reason) == ("one two ", FinishReason.STOP, "STOP")
            assert tokens == len(tokenizer.encode("one two STOP", add_special_tokens=False))
            [request] = engine.submitted()
            await until(lambda: engine.aborted() == {request.id})
            assert pipeline.client.num_open == 0

    run(scenario())


def test_eos_of_the_tokenizer_ends_the_sample(serve, run, tokenizer):
    async def scenario():
        ids = [*tokenizer.encode("hello", add_special_tokens=False), tokenizer.eos_ids[0], 5]
        async with serve(say(ids)) as (pipeline, _):
            [found] = await collect(await pipeline.generate(ask()))
            assert found == ("hello", 1, 2, FinishReason.STOP, None)
            [found] = await collect(
                await pipeline.generate(
                    ask(ignore_eos=True, max_tokens=2, skip_special_tokens=False)
                )
            )
            assert found[0] == "hello</s>"

    run(scenario())


def test_samples_are_told_apart_by_index(serve, run):
    async def scenario():
        def script(request):
            return say([50 + (request.sampling.seed or 0)] * 4)(request)

        async with serve(script) as (pipeline, engine):
            generation = await pipeline.generate(ask(n=3, seed=0, max_tokens=4))
            assert generation.num_samples == 3
            found = await collect(generation)
            assert [tokens for _, tokens, *_ in found] == [4, 4, 4]
            assert len({text for text, *_ in found}) == 3
            assert [one.leader for one in engine.submitted()][1:] == [engine.submitted()[0].id] * 2

    run(scenario())


def test_best_of_returns_the_best_samples_renumbered(serve, run):
    async def scenario():
        def script(request):
            seed = request.sampling.seed
            entry = TokenLogprob(60 + seed, -abs(seed - 2.0), 1)
            prompt = () if request.sampling.prompt_logprobs is None else (entry,)
            delta = TokenDelta(
                request_id=request.id,
                token_ids=(60 + seed,),
                logprobs=(entry,),
                prompt_logprobs=prompt,
                finish=FinishReason.LENGTH,
            )
            return [delta]

        async with serve(script) as (pipeline, engine):
            asked = ask(n=2, best_of=4, seed=0, max_tokens=1, prompt_logprobs=0)
            generation = await pipeline.generate(asked)
            assert generation.num_samples == 2
            deltas = [delta async for delta in generation]
            # seed 2 is best; seeds 1 and 3 are equal, the earlier one wins
            assert [(delta.index, delta.token_ids) for delta in deltas] == [(0, (62,)), (1, (61,))]
            assert [len(delta.prompt_logprobs) for delta in deltas] == [1, 0]
            assert all(delta.logprobs == () and delta.finish for delta in deltas)
            assert len(engine.submitted()) == 4

    run(scenario())


def test_stream_interval_coalesces_and_stream_false_sends_one_delta(serve, run):
    async def scenario():
        async with serve(ENDLESS, stream_interval=5) as (pipeline, _):
            [found] = await collect(await pipeline.generate(ask(max_tokens=12)))
            assert found[1:3] == (12, 4)  # tokens 1, 5, 10 and the finish
            [found] = await collect(await pipeline.generate(ask(max_tokens=12), stream=False))
            assert found[1:3] == (12, 1)

    run(scenario())


@pytest.mark.parametrize("way", ["cancel", "aclose", "with"])
def test_leaving_early_aborts_what_runs(serve, run, way):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, engine):
            generation = await pipeline.generate(ask(n=2, max_tokens=4000))
            await anext(generation)
            if way == "cancel":
                reader = asyncio.create_task(collect(generation))
                await asyncio.sleep(0.02)
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            elif way == "aclose":
                await generation.aclose()
            else:
                async with generation:
                    pass
            assert pipeline.client.num_open == 0
            await until(lambda: len(engine.aborted()) == 2)
            assert [delta async for delta in generation] == []

    run(scenario())


def test_closing_wakes_a_reader_that_waits(serve, run):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, engine):
            engine.going.clear()
            generation = await pipeline.generate(ask())
            reader = asyncio.create_task(collect(generation))
            await asyncio.sleep(0.01)
            await generation.aclose()
            assert await reader == []

    run(scenario())


def test_a_bug_in_one_request_does_not_touch_the_others(serve, run, monkeypatch):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, engine):
            engine.going.clear()
            broken = await pipeline.generate(ask(max_tokens=3))
            healthy = await pipeline.generate(ask(max_tokens=3))
            [sample] = broken._open.values()
            monkeypatch.setattr(sample, "push", lambda delta: 1 / 0)
            engine.going.set()
            with pytest.raises(ZeroDivisionError):
                await anext(broken)
            [found] = await collect(healthy)
            assert found[1] == 3

    run(scenario())


def test_abort_lets_every_sample_finish_as_cancelled(serve, run):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, _):
            generation = await pipeline.generate(ask(n=2, max_tokens=4000))
            await anext(generation)
            generation.abort()
            ends = [delta.finish async for delta in generation if delta.finish]
            assert ends == [FinishReason.ABORT, FinishReason.ABORT]

    run(scenario())


def test_engine_death_ends_every_sample_with_its_reason(serve, run):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, engine):
            generation = await pipeline.generate(ask(n=2, max_tokens=4000))
            await anext(generation)
            engine.going.clear()
            pipeline.client.engine_died(0, "the engine process ended by signal 9")
            ends = [delta async for delta in generation if delta.finish]
            assert [end.finish for end in ends] == [FinishReason.ERROR] * 2
            assert {end.error for end in ends} == {"the engine process ended by signal 9"}

    run(scenario())


def test_over_capacity_is_refused_and_leaves_nothing_behind(serve, run):
    async def scenario():
        async with serve(ENDLESS, info=make_info(max_queued=2)) as (pipeline, _):
            first = await pipeline.generate(ask(n=2))
            with pytest.raises(CapacityError):
                await pipeline.generate(ask())
            await first.aclose()
            await (await pipeline.generate(ask())).aclose()

    run(scenario())


def test_five_hundred_streams_through_the_whole_pipeline(serve, run):
    async def scenario():
        async with serve() as (pipeline, _):
            generations = [await pipeline.generate(ask(max_tokens=16)) for _ in range(500)]
            for [(text, tokens, deltas, _, _)] in await asyncio.gather(*map(collect, generations)):
                assert (tokens, deltas) == (16, 16)
                assert text.startswith("hello world")

    run(scenario())


class Listener:
    """A subscriber that remembers."""

    def __init__(self):
        self.deltas, self.bugs = [], []

    def on_text(self, prompt, delta):
        assert prompt == 3
        self.deltas.append(delta)

    def on_bug(self, bug):
        self.bugs.append(bug)

    @property
    def has_ended(self):
        return bool(self.bugs) or (bool(self.deltas) and self.deltas[-1].finish is not None)


def test_a_subscriber_is_handed_what_an_iteration_would_give(serve, run):
    async def scenario():
        async with serve() as (pipeline, _):
            listener = Listener()
            generation = await pipeline.generate(ask(max_tokens=12, n=2))
            generation.subscribe(3, listener.on_text, listener.on_bug)
            iterated = [d async for d in await pipeline.generate(ask(max_tokens=12, n=2))]
            await until(lambda: sum(d.finish is not None for d in listener.deltas) == 2)
            assert sorted(listener.deltas, key=lambda d: (d.index, d.finish is not None)) == sorted(
                iterated, key=lambda d: (d.index, d.finish is not None)
            )

    run(scenario())


def test_a_subscriber_who_comes_late_misses_nothing(serve, run):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, _):
            generation = await pipeline.generate(ask(max_tokens=6))
            await until(lambda: pipeline.client.num_open == 0)
            listener = Listener()
            generation.subscribe(3, listener.on_text, listener.on_bug)
            assert len(listener.deltas) == 6 and listener.has_ended

    run(scenario())


def test_a_held_generation_gathers_and_catches_up(serve, run):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, _):
            generation = await pipeline.generate(ask(max_tokens=10**4, stop=["never"]))
            listener = Listener()
            generation.subscribe(3, listener.on_text, listener.on_bug)
            await until(lambda: len(listener.deltas) > 3)
            generation.hold()
            num_before = len(listener.deltas)
            sample = next(iter(generation._open.values()))
            await until(lambda: len(sample._ids) > 50)
            assert len(listener.deltas) == num_before
            generation.release()
            assert len(listener.deltas) == num_before + 1
            assert len(listener.deltas[-1].token_ids) > 50
            await until(lambda: len(listener.deltas) > num_before + 3)
            generation.hold()
            generation.abort()
            assert listener.deltas[-1].finish is FinishReason.ABORT  # the end is never held back

    run(scenario())


def test_a_subscriber_hears_of_a_mistake_of_ours_and_nothing_after_closing(serve, run, monkeypatch):
    async def scenario():
        async with serve(ENDLESS) as (pipeline, engine):
            listener = Listener()
            generation = await pipeline.generate(ask(max_tokens=10**6))
            generation.subscribe(3, listener.on_text, listener.on_bug)
            await until(lambda: listener.deltas)
            sample = next(iter(generation._open.values()))
            monkeypatch.setattr(sample, "push", lambda delta: 1 // 0)
            await until(lambda: listener.has_ended)
            assert [type(bug) for bug in listener.bugs] == [ZeroDivisionError]
            other = Listener()
            closed = await pipeline.generate(ask(max_tokens=10**6))
            closed.subscribe(3, other.on_text, other.on_bug)
            await until(lambda: other.deltas)
            await closed.aclose()
            num_heard = len(other.deltas)
            await until(lambda: len(engine.aborted()) == 2)
            await asyncio.sleep(0.05)
            assert len(other.deltas) == num_heard and not other.bugs

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_the_first_token_of_each_sample_is_told_when_it_arrives(serve, run, stream):
    async def scenario():
        begun = []
        async with serve(ENDLESS) as (pipeline, engine):
            endless = ask(n=2, max_tokens=1 << 11)
            generation = await pipeline.generate(endless, stream, lambda: begun.append(1))
            assert begun == [] and generation.num_tokens == 0
            await until(lambda: len(begun) == 2)
            assert engine.submitted()[0].stream_interval == (1 if stream else 64)
            await until(lambda: generation.num_tokens > 4)  # counted, whether it is sent or not
            await generation.aclose()
            assert len(begun) == 2 and generation.num_tokens > 4

    run(scenario())


FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")


def test_a_suffix_makes_a_prompt_with_a_gap_that_ends_at_the_family_s_tokens(
    connect, run, tmp_path
):
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens(list(FIM))
    tokenizer = Tokenizer.from_folder(tiny_tokenizers.write_folder(tmp_path, backend))

    async def scenario():
        async with connect(say(range(40, 60))) as (client, [engine]):
            pipeline = GenerationPipeline(client, tokenizer, None)
            asked = replace(ask("hello", max_tokens=2), suffix=" well")
            generation = await pipeline.generate(asked)
            await collect(generation)
            [sent] = engine.submitted()
            text = "<fim_prefix>hello<fim_suffix> well<fim_middle>"
            assert sent.prompt_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
            assert set(map(tokenizer.id_of, FIM)) <= set(sent.stop_ids)
            assert generation.prompt_text is None
            with pytest.raises(RequestError, match="truncate_prompt_tokens would cut"):
                await pipeline.generate(replace(asked, truncate_prompt_tokens=3))

    run(scenario())


def test_a_suffix_for_a_model_that_fills_no_gaps_is_refused(serve, run):
    async def scenario():
        async with serve() as (pipeline, engine):
            with pytest.raises(RequestError, match="no tokens for filling in the middle") as caught:
                await pipeline.generate(replace(ask(), suffix="end"))
            assert caught.value.param == "suffix"
            assert engine.submitted() == []

    run(scenario())


def test_a_template_of_a_request_is_used_only_where_the_server_trusts_it(connect, run, tokenizer):
    async def scenario():
        async with connect() as (client, _):
            processes = TemplateProcess(TemplateTexts({}, tokenizer.special_tokens))
            trusting = GenerationPipeline(client, tokenizer, None, request_renderer=processes)
            wary = GenerationPipeline(client, tokenizer, None)
            messages = ({"role": "user", "content": "hi"},)
            chat = ChatOptions(template="{{ bos_token }}-{{ messages[0].content }}")
            asked = GenerateInput(messages=messages, chat=chat, add_special_tokens=False)
            try:
                ids, text = await trusting.tokenize(asked)
                assert text == "<s>-hi"
                assert ids == tuple(tokenizer.encode(text, add_special_tokens=False))
                with pytest.raises(RequestError, match="--trust_request_chat_template") as refusal:
                    await wary.tokenize(asked)
                assert refusal.value.param == "chat_template"
            finally:
                await processes.aclose()

    run(scenario())
