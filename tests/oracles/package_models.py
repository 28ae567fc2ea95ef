"""Random heads written by the `speculators` package, and what that package computes with them.

Runs in an environment of its own (`make oracles`), which has that package and not this one:

    python package_models.py OUT SEED [NAME ...]

OUT/verifier is the model that all heads draft for, OUT/NAME a head as the package saves it (in bfloat16), and
OUT/cases/NAME.safetensors the inputs of its forward and the float32 outputs. NAME is one of MODELS; all without names.
"""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

VOCAB, HIDDEN, LAYERS, LENGTH = 64, 32, 4, 20
TAPS = (1, 2, 4)  # 1-based, as the package counts them: the stream that leaves so many layers
MASK_TOKEN, BLOCK, STEPS = 63, 6, 3
ANCHORS = (2, 7, 12)  # positions that blocks and parallel drafts start from
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


def proposals(algorithm, tokens):
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained("verifier"),
    )


def layers(count, kind=Qwen3Config):
    config = kind(**SHAPE, num_hidden_layers=count)
    config._attn_implementation = "eager"
    return config


def randomised(module):
    """Every parameter random, norms around one; drafted tokens of a reduced vocabulary are every other one."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            noise = torch.randn(value.shape)
            value.copy_((1.0 + 0.3 * noise if value.dim() == 1 and "bias" not in name else 0.25 * noise).bfloat16())
    return module.eval()


def inputs(features):
    tokens = torch.randint(0, VOCAB - 1, (1, LENGTH))
    return {"tokens": tokens, "features": torch.randn(1, LENGTH, features)}


@torch.no_grad()
def mtp():
    config = MTPSpeculatorConfig(transformer_layer_config=layers(LAYERS), speculators_config=proposals("mtp", STEPS))
    model = randomised(MTPDraftModel(config))
    model.load_verifier_weights()
    case = inputs(HIDDEN)
    logits, _, _ = model(case["tokens"], case["features"])
    return model, case | {f"logits.{step}": rows for step, rows in enumerate(logits)}


def _block(kind, config, **options):
    outputs = options.pop("draft_vocab_size", VOCAB)
    config = config(
        transformer_layer_config=layers(2), draft_vocab_size=outputs, block_size=BLOCK, aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=MASK_TOKEN, speculators_config=proposals(config.model_fields["speculators_model_type"].default, BLOCK),
        **options,
    )  # fmt: skip
    model = randomised(kind(config))
    if outputs < VOCAB:
        known = torch.arange(0, 2 * outputs, 2)
        model.load_vocab_mappings(torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, True), known - torch.arange(outputs))
    model.load_verifier_weights()
    case = inputs(len(TAPS) * HIDDEN)
    chosen = torch.zeros(1, LENGTH)
    chosen[0, list(ANCHORS)] = 1.0
    documents, last = torch.zeros(1, LENGTH, dtype=torch.int64), torch.randn(1, LENGTH, HIDDEN)
    hidden, logits, *_ = model._backbone_forward(
        case["features"], case["tokens"], chosen, last, documents, max_anchors=len(ANCHORS)
    )
    shape = (len(ANCHORS), BLOCK, -1)
    case |= {"anchors": torch.tensor(ANCHORS), "hidden": hidden.view(shape), "logits": logits.view(shape)}
    return model, case | {"before": torch.randint(0, VOCAB - 1, shape[:2])}  # tokens before each slot, for what reads them


@torch.no_grad()
def dflash():
    return _block(DFlashDraftModel, DFlashSpeculatorConfig)


@torch.no_grad()
def dflash_reduced():
    return _block(DFlashDraftModel, DFlashSpeculatorConfig, draft_vocab_size=24)


def _dspark(head, **options):
    model, case = _block(DSparkDraftModel, DSparkSpeculatorConfig, markov_rank=8, markov_head_type=head, **options)
    embedded = model.markov_head.prev_embeddings(case["before"])
    bias = model.markov_head.block_bias(prev_token_ids=case["before"], hidden_states=case["hidden"])
    confidence = model.confidence_head(torch.cat((case["hidden"], embedded), -1))
    return model, case | {"biased": case["logits"] + bias, "confidence": confidence}


@torch.no_grad()
def dspark():
    return _dspark("vanilla")


@torch.no_grad()
def dspark_gated():
    return _dspark("gated", sample_from_anchor=False)


@torch.no_grad()
def dspark_rnn():
    return _dspark("rnn")


@torch.no_grad()
def dflash2():
    options = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
    model, case = _block(DFlash2DraftModel, DFlash2SpeculatorConfig, **options)
    best = case["logits"].topk(5, dim=-1).indices.view(1, -1, 5)
    flat = (1, len(ANCHORS) * BLOCK)
    scores = model.candidate_selector.score_candidates(
        case["logits"].view(*flat, -1), case["hidden"].view(*flat, -1), case["before"].view(flat), best
    )
    return model, case | {"candidates": best.view(len(ANCHORS), BLOCK, 5), "scores": scores.view(len(ANCHORS), BLOCK, 5)}


@torch.no_grad()
def eagle3():
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers(1, LlamaConfig), draft_vocab_size=VOCAB, norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(TAPS), speculators_config=proposals("eagle3", STEPS),
    )  # fmt: skip
    model = randomised(Eagle3DraftModel(config))
    model.load_verifier_weights()
    case, caught = inputs(len(TAPS) * HIDDEN), []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    model(case["features"], case["tokens"], torch.zeros(1, LENGTH, dtype=torch.int64), ttt_steps=1)
    return model, case | {"logits": caught[0]}


@torch.no_grad()
def peagle():
    """Row r carries the feature of position `start[r]` where `depth[r]` is 0, and is masked where it is deeper."""
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers(2, LlamaConfig), draft_vocab_size=VOCAB, norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(TAPS), mask_token_id=MASK_TOKEN, speculators_config=proposals("peagle", STEPS),
    )  # fmt: skip
    model = randomised(PEagleDraftModel(config))
    model.load_verifier_weights()
    case, caught = inputs(len(TAPS) * HIDDEN), []
    start = torch.cat((torch.arange(LENGTH), *[torch.tensor(ANCHORS)] * (STEPS - 1)))
    depth = torch.cat((torch.zeros(LENGTH, dtype=torch.int64), torch.arange(1, STEPS).repeat_interleave(len(ANCHORS))))
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    module = "speculators.models.peagle.core"
    sampled, no_loss = patch(f"{module}.generate_cod_sample_indices", lambda **_: (start, depth)), (torch.zeros(()), {})
    with sampled, patch(f"{module}.compute_metrics", lambda **_: no_loss):
        documents, last = torch.zeros(1, LENGTH, dtype=torch.int64), torch.randn(1, LENGTH, HIDDEN)
        model(case["features"], case["tokens"], documents, verifier_last_hidden_states=last, num_depths=STEPS)
    return model, case | {"start": start, "depth": depth, "logits": caught[0]}


MODELS = (mtp, dflash, dflash_reduced, dspark, dspark_gated, dspark_rnn, dflash2, eagle3, peagle)


def save(model, name):
    """Weights and configuration alone: the package adds files of its own code."""
    model.to(torch.bfloat16).save_pretrained(name)
    for path in Path(name).iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def main(out, seed, names):
    (out / "cases").mkdir(parents=True)
    os.chdir(out)
    torch.manual_seed(seed)
    save(randomised(Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=LAYERS))), "verifier")
    for make in MODELS:
        if not names or make.__name__ in names:
            torch.manual_seed(seed + 1)
            model, case = make()
            save_file({name: value.contiguous() for name, value in case.items()}, f"cases/{make.__name__}.safetensors")
            save(model, make.__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3:])
