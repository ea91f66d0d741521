"""`PeftTrainer`: the trainer that runs wherever torch runs. One LoRA adapter, one AdamW, one optimizer step a call unless
more are asked for.

A step lays all sequences into one trie, cuts it into rows and adds up their gradients, each prediction weighted as in the
whole batch. So the result does not depend on the row budget, on the order of the sequences, or on how many rows there
are. Passes beside the one with the gradient are made only where an option needs them: for a reference policy, for the
ratio of a whole call, and for the trainer's own old logprobs when there are several optimizer steps.

The model is always in eval mode: the first step on fresh samples then computes the very function that sampled them.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from art_backend.adapter_files import read_adapter, save_adapter
from art_backend.base_model import load_model, resolve
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.minibatches import Minibatch, make_minibatch, make_minibatches
from art_backend.objective import PolicyObjective, call_log_ratios, needs_call_log_ratios, needs_start
from art_backend.optim_state import STATE_FOLDER, read_trainer_state, save_trainer_state
from art_backend.packed_model import PackedModel, Scores
from art_backend.protocols import TrainSequence
from art_backend.schedules import learning_rate
from art_backend.session import Session
from art_backend.step_metrics import PhaseClock, PolicyTally, Tally
from art_core.errors import TrainingError


class PeftTrainer:
    """Trains a LoRA adapter with PEFT, on a GPU where there is one. Implements `art_backend.protocols.Trainer`.

    Args:
        dtype: of the base weights; None: what is fast on this machine. The adapter is always float32.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._loaded: Session | None = None

    def load(self, base_model: str, adapter: AdapterConfig, seed: int) -> None:
        """Load the base model and attach a fresh adapter; `seed` fixes its weights.

        Raises TrainingError for a model that cannot compute packed rows, ConfigError or ModelError when it is not found.
        """
        model = load_model(resolve(base_model), self._dtype)
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self._loaded = Session.attach(PackedModel(model), base_model, adapter, seed)

    def step(
        self, sequences: Sequence[TrainSequence], config: GRPOConfig, reference: Path | None = None
    ) -> dict[str, float]:
        """One step of the GRPO loss: an optimizer step for each minibatch and epoch.

        Args:
            reference: adapter of the reference policy, where `config` asks for one; None: the base model.

        Raises TrainingError, or ConfigError when the sampled logprobs are those before temperature or the learning rate
        schedule has ended, and then has changed nothing.
        """
        session, clock = self._session(), PhaseClock()
        rate = learning_rate(config, session.policy_steps)
        with clock("pack"):
            batches = make_minibatches(sequences, session.packed.device, config, seed=session.policy_steps)
        for batch in batches:
            _check(batch, session.packed.vocabulary)
        optimizer_steps = config.epochs * len(batches)
        plan = session.plan_activations(config, batches)
        with clock("score"):
            start = needs_start(config, optimizer_steps)
            for batch in batches:
                if start or batch.lacks_logprobs:
                    own = session.score(batch)
                    batch.start = own if start else None
                    if batch.lacks_logprobs:
                        batch.fill_in(own)
            if config.measures_reference:
                session.score_reference(batches, reference)
        tally, norms = PolicyTally(), []
        with session.undone_on_error(optimizer_steps):
            for batch in batches * config.epochs:
                with clock("score"):
                    of_calls = None
                    if needs_call_log_ratios(config, batch):
                        of_calls = call_log_ratios(config, batch, session.score(batch))
                with clock("backward"):
                    objective = PolicyObjective(config, batch, tally, of_calls)
                    norms.append(session.gradient(batch, objective, config.max_grad_norm, recompute=plan.recompute))
                tally.close_gaps()
                with clock("optimizer"):
                    session.descend(config, rate)
        session.policy_steps += 1
        plan.settle()
        return (
            tally.metrics(optimizer_steps)
            | clock.metrics()
            | plan.metrics()
            | _metrics(sequences, batches, norms, rate)
        )

    def sft_step(self, sequences: Sequence[TrainSequence], config: SFTConfig) -> dict[str, float]:
        """One optimizer step of cross-entropy on the sampled tokens (those whose logprob is not None), mean over tokens.

        Raises TrainingError, and then has changed nothing.
        """
        session, clock, tally = self._session(), PhaseClock(), Tally()
        with clock("pack"):
            batch = make_minibatch(sequences, session.packed.device, budget=config.packed_sequence_length)
        _check(batch, session.packed.vocabulary)
        plan = session.plan_activations(config, [batch])

        def objective(scores: Scores) -> torch.Tensor:
            losses = -scores.logprob * batch.weight[scores.entry]
            tally.add(scores, losses)
            return losses

        with clock("backward"):
            norm = session.gradient(batch, objective, config.max_grad_norm, recompute=plan.recompute)
        with clock("optimizer"):
            session.descend(config, config.learning_rate)
        plan.settle()
        of_batch = _metrics(sequences, [batch], [norm], config.learning_rate)
        return tally.metrics() | clock.metrics() | plan.metrics() | of_batch

    def save(self, folder: Path) -> None:
        """Write the PEFT adapter to `folder` and optimizer, step numbers and RNG to `folder/trainer_state/`."""
        session = self._session()
        save_adapter(folder, session.adapter)
        save_trainer_state(
            folder / STATE_FOLDER, session.optimizer, session.parameters, session.steps, session.policy_steps
        )

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote, also when that adapter has another rank, or is on other layers, than the one here.

        Raises CheckpointError when a part is missing, damaged or of another model, and then has changed nothing.
        """
        session = self._session()
        saved = read_adapter(folder)
        saved.check(session.adapter)
        state = read_trainer_state(folder / STATE_FOLDER, saved.tensors)
        if saved.shape != session.shape:
            self._loaded = session = session.reshaped(saved.shape)
        saved.apply(session.parameters)
        state.apply(session.optimizer, session.parameters)
        session.steps, session.policy_steps = state.steps, state.policy_steps

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _session(self) -> Session:
        if self._loaded is None:
            raise TrainingError("no model is loaded: call `load` first.")
        return self._loaded


def _metrics(
    sequences: Sequence[TrainSequence], batches: list[Minibatch], norms: list[float], rate: float
) -> dict[str, float]:
    """What was computed, in one pass over the batch; the gradient's norm is the mean over optimizer steps."""
    computed, distinct = sum(batch.tokens for batch in batches), sum(len(batch.trie.token_ids) for batch in batches)
    return {
        "loss/grad_norm": sum(norms) / len(norms),
        "loss/learning_rate": rate,
        "data/optimizer_steps": float(len(norms)),
        "data/tokens_trained": float(sum(len(batch.trie.predictions) for batch in batches)),
        "data/tokens_computed": float(computed),
        "data/tokens_naive": float(sum(len(sequence.token_ids) for sequence in sequences)),
        "data/rows": float(sum(len(batch.rows) for batch in batches)),
        # Rows have no padding; what costs without teaching is a prefix that a row has to compute once more.
        "data/padding_share": 1 - distinct / computed,
    }


def _check(batch: Minibatch, vocabulary: int) -> None:
    if not len(batch.trie.predictions):
        raise TrainingError("there is no token to train: no sequence has a sampled token with a logprob.")
    ids = np.concatenate([batch.trie.token_ids, batch.trie.predictions.target])
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise TrainingError(
            f"a sequence has token id {ids.max() if ids.max() >= vocabulary else ids.min()}, but the model knows 0 to "
            f"{vocabulary - 1}: sample with the model that is trained."
        )
