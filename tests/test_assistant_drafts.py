"""The assistant in our packages proposes what transformers' candidate generator proposes, token for token, K/V in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import tiny_gemma4
from support.sessions import open_runner
from support.trained_pair import assistant_settings, random_assistant, save_assistant

from llm_gemma_coreml.convert.assistant_source import AssistantSource
from llm_gemma_coreml.convert.quantise import quantised_tensor
from llm_gemma_coreml.convert.source import open_source
from llm_gemma_coreml.drafting.assistant import Assistant
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.portable.model import OnnxModel
from llm_gemma_coreml.runtime.portable.states import View

ROUNDS, DRAFTS = 200, 4
TIE = 0.02
"""Logits closer than this may change places: packages compute in another order, and round activations to fp16."""
CONTEXTS = (256, 512, 1024)


@dataclass(frozen=True)
class Pair:
    """A bundle with an assistant, and both models in transformers with the bundle's weights."""

    bundle: Path
    target: Any
    assistant: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("assistant"), "ssfsf", "sssf")


def make_pair(folder: Path, layers: str, assistant_layers: str, bits: int = 16) -> Pair:
    settings = tiny_gemma4.config(layers)
    source = tiny_gemma4.checkpoint(folder / "target", settings)
    document = assistant_settings(settings, assistant_layers)
    assistant = random_assistant(document)
    drafter = save_assistant(assistant, document, folder / "assistant")
    bundle = tiny_gemma4.bundle(folder, source, contexts=CONTEXTS, widths=(1, 8, 128), bits=bits, drafter=drafter)
    target = tiny_gemma4.reference_model(settings, tiny_gemma4.package_tensors(bundle))
    as_stored(assistant, drafter, source, bits)
    return Pair(bundle, target, assistant)


def as_stored(model: Any, drafter: Path, target: Path, bits: int) -> None:
    """Round the model's weights as a bundle of that many bits stores them."""
    import torch

    opened = open_source(target)
    source = AssistantSource(drafter, opened.config)
    names = {"pre_projection": model.pre_projection, "post_projection": model.post_projection}
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        own = {"q": attention.q_proj, "o": attention.o_proj, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        names |= {f"layers.{number}.{name}": module for name, module in own.items()}
    with torch.no_grad():
        for name, module in names.items():
            stored = (
                source.tensor(name).astype(np.float16).astype(np.float32)
                if bits == 16
                else quantised_tensor(source, name, bits).dequantise()
            )
            module.weight.copy_(torch.from_numpy(stored))
        embedding = quantised_tensor(source, "embedding", 8).dequantise()
        model.model.embed_tokens.weight.copy_(torch.from_numpy(embedding))
    model.tie_weights()
    source.close()
    opened.close()


class Oracle:
    """transformers' candidate generator over a known text, of which the target has validated the first tokens."""

    def __init__(self, pair: Pair, ids: list[int]) -> None:
        import torch
        from transformers import GenerationConfig
        from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

        self._ids = torch.tensor([ids])
        pair.assistant.generation_config.num_assistant_tokens = DRAFTS
        self._generator = SinglePositionMultiTokenCandidateGenerator(
            pair.assistant, pair.target.get_input_embeddings(), GenerationConfig(max_length=10**6)
        )
        with torch.no_grad():
            found = pair.target(self._ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        self._hidden = found.hidden_states[-1]
        # The target's K/V as its cache holds them.
        self._shared = {kind: [each.half().float() for each in both] for kind, both in found.shared_kv_states.items()}

    def drafts(self, validated: int, last_matches: int) -> tuple[list[int], np.ndarray]:
        """Drafts and their logits [DRAFTS, vocabulary], with `validated` tokens in the cache and one more known.

        The last call of the target validated `last_matches` drafts and the token before them.
        """
        import torch

        shared = {kind: tuple(each[:, :, :validated] for each in both) for kind, both in self._shared.items()}
        rows = self._hidden[:, validated - last_matches - 1 : validated]
        candidates, logits = self._generator.get_candidates(
            self._ids[:, : validated + 1],
            {"attention_mask": torch.ones(1, validated + 1, dtype=torch.long)},
            SimpleNamespace(hidden_states=(rows,), shared_kv_states=shared),
            is_first_iteration=False,
            n_last_matches=last_matches,
        )
        return candidates[0, validated + 1 :].tolist(), logits[0].numpy()


def committed_in_rounds(session: Session, ids: list[int], rounds: int) -> Iterator[tuple[int, int]]:
    """Extend a session as verify calls do, rejected drafts included: (validated tokens, matches of the last call)."""
    chance = np.random.default_rng(0)
    session.extend(ids[:40])
    yield 40, 0
    for _ in range(rounds - 1):
        if rounds < ROUNDS:  # fewer rounds, over as long a text
            session.extend(ids[len(session) : len(session) + 3 * ROUNDS // rounds - 3])
        kept = int(chance.integers(1, 6))
        kept = min(kept, session.rows_allowed())
        wrong = chance.integers(3, 300, min(session.rows_allowed(), 8) - kept).tolist()
        position = len(session)
        session.run([*ids[position : position + kept], *wrong])
        session.commit(kept)
        yield len(session), kept - 1


def same_drafts(pair: Pair, runner: ModelRunner, rounds: int = ROUNDS) -> tuple[int, int]:
    """Compare the drafts of that many rounds: (drafts compared, rounds that a tie decided)."""
    ids = tiny_gemma4.random_ids(CONTEXTS[-1] - 8)
    oracle, session = Oracle(pair, ids), Session(runner)
    drafter = Assistant(session)
    compared = ties = 0
    for number, (validated, matches) in enumerate(committed_in_rounds(session, ids, rounds)):
        drafter.begin(ids[: validated + 1], [])
        found = [token for token, _ in islice(drafter.steps(), DRAFTS)]
        expected, logits = oracle.drafts(validated, matches)
        for own, other, row in zip(found, expected, logits, strict=True):
            if own != other:
                assert row[other] - row[own] < TIE, f"round {number} at {validated}: {own} instead of {other}"
                ties += 1
                break
            compared += 1
    assert session.promotions == len(CONTEXTS) - 1
    return compared, ties


def test_the_drafts_are_those_of_transformers(pair: Pair) -> None:
    """Past the window and the wrap of the ring, over both promotions, with rejected drafts lying about."""
    runner = open_runner(pair.bundle, exact=True)
    compared, ties = same_drafts(pair, runner)
    assert compared > ROUNDS * DRAFTS * 0.95
    assert ties <= ROUNDS * 0.05
    runner.close()


@pytest.mark.parametrize(("layers", "assistant_layers", "bits"), [("sf", "sf", 16), ("sffsf", "ffsf", 8)])
def test_other_patterns_and_int8(tmp_path: Path, layers: str, assistant_layers: str, bits: int) -> None:
    pair = make_pair(tmp_path, layers, assistant_layers, bits)
    runner = open_runner(pair.bundle, exact=True)
    _, ties = same_drafts(pair, runner, 50)
    assert ties <= 4
    runner.close()


def test_steps_go_on_after_drafts_of_another(pair: Pair) -> None:
    """With its own first drafts as the prefix, the assistant goes on as if it had made them in this round."""
    ids, runner = tiny_gemma4.random_ids(300), open_runner(pair.bundle, exact=True)
    session = Session(runner)
    session.extend(ids[:-1])
    drafter = Assistant(session)
    drafter.begin(ids, [])
    whole = list(islice(drafter.steps(), 6))
    for length in (1, 3):
        prefix = [token for token, _ in whole[:length]]
        assert list(islice(drafter.steps(prefix), 6 - length)) == whole[length:]
    runner.close()


def test_the_targets_keys_and_values_are_read_in_place(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every K/V array that ONNX Runtime is given is the state's own memory, no longer than needed, and stays as it is."""
    runner, seen = open_runner(pair.bundle), []
    session = Session(runner)
    session.extend(tiny_gemma4.random_ids(300))
    run = OnnxModel.run

    def recorded(
        model: OnnxModel, feeds: Mapping[str, np.ndarray], views: Mapping[str, View], written: Mapping[str, str], *, rows: int
    ) -> dict[str, np.ndarray]:
        seen.append((dict(feeds), dict(views), dict(written)))
        return run(model, feeds, views, written, rows=rows)

    monkeypatch.setattr(OnnxModel, "run", recorded)
    (state,) = [state for state in session.states if state is not None]
    before = {name: buffer.copy() for name, buffer in state.buffers().items()}
    runner.assistant_step(session.states, session.slots, 5, session.last_hidden)
    ((feeds, views, written),) = seen
    assert not written
    assert {name.split("/")[0] for name in views} == {"k_3", "v_3", "k_4", "v_4"}
    for name, view in views.items():
        state_name, _, head = name.split("/")
        buffer = state.buffers()[state_name]
        assert view.data_ptr() == buffer[int(head)].ctypes.data
        rows = math.prod(view.shape()) // buffer.shape[2]
        assert rows == (256 if state_name.endswith("3") else 384)  # the ring, and 300 in blocks of 128
    assert not [name for name, array in feeds.items() if array.nbytes > 4096]
    assert all(np.array_equal(before[name], buffer) for name, buffer in state.buffers().items())
    runner.close()


def test_functions_of_all_rungs_are_one_session(pair: Pair) -> None:
    runner = open_runner(pair.bundle)
    session = Session(runner)
    for length in (100, 300, 600):
        session.extend(tiny_gemma4.random_ids(length)[len(session) :])
        runner.assistant_step(session.states, session.slots, 5, session.last_hidden)
    compiled = runner._layers[-1]._compiled.functions  # type: ignore[attr-defined]
    models = {compiled[f"assistant_context_{rung}"].model for rung in CONTEXTS}
    assert len(models) == 1
    runner.close()


def test_no_drafts_from_a_session_that_is_elsewhere(pair: Pair) -> None:
    runner = open_runner(pair.bundle)
    session, ids = Session(runner), tiny_gemma4.random_ids(60)
    drafter = Assistant(session)
    drafter.begin(ids[:1], [])
    assert list(islice(drafter.steps(), 1)) == []  # nothing is committed
    session.extend(ids)
    drafter.begin([*ids, 5], [])
    assert len(list(islice(drafter.steps(), 3))) == 3
    drafter.observe([6, 7], 0, 0)
    assert list(islice(drafter.steps(), 1)) == []  # two tokens that the session does not have
    session.rewind(40)
    drafter.begin(ids[:41], [])
    assert list(islice(drafter.steps(), 1)) == []  # the hidden state is gone
    runner.close()


def test_suppressed_tokens_are_not_proposed(pair: Pair) -> None:
    from dataclasses import replace

    runner = open_runner(pair.bundle)
    session, ids = Session(runner), tiny_gemma4.random_ids(60)
    session.extend(ids)
    drafter = Assistant(session)
    drafter.begin([*ids, 5], [])
    ((usual, _),) = islice(drafter.steps(), 1)
    runner.manifest = replace(runner.manifest, suppressed_ids=(usual,))
    other = Assistant(session)
    other.begin([*ids, 5], [])
    ((token, _),) = islice(other.steps(), 1)
    assert token != usual
    runner.close()
