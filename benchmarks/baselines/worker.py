"""One engine in a separate process, in whichever Python has it: a JSON object per line in, one out.

The first line says what to load: {"peer", "model", "draft", "modes", "dtype", "threads", "context", "device"}; the answer
has "versions". Every further line is {"mode", "ids", "tokens"}, greedy and never stopped early; the answer has "ids",
"first_s" and "total_s". A request to Outrider may also have "top", for log probabilities, as pairs for each of its tokens.
A fault is answered by {"error"}, a package that is not there by {"missing"}.

The file runs by itself: it imports nothing of Outrider unless Outrider is the engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import time
from typing import Any


class TimedReply(dict):  # type: ignore[type-arg]
    """An answer in the making: the clock starts with it."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = time.perf_counter()

    def first(self) -> None:
        self.setdefault("first_s", time.perf_counter() - self._begun)

    def done(self, ids: list[int]) -> TimedReply:
        self["total_s"] = time.perf_counter() - self._begun
        self["ids"] = ids
        return self


class Outrider:
    packages = ("torch",)

    def __init__(self, load: dict[str, Any]) -> None:
        import torch

        from outrider import LLM
        from outrider._version import __version__

        torch.set_num_threads(load["threads"])
        settings = {"dtype": load["dtype"], "prefix_cache": False, "max_num_seqs": 1, "device": load.get("device", "cpu")}
        self._llms = {mode: LLM(load["model"], speculation=mode, share=False, **settings) for mode in load["modes"]}
        for llm in self._llms.values():
            llm.measure_costs()  # as a server does when it starts
        self.versions = {"outrider": __version__}

    def generate(self, mode: str, ids: list[int], tokens: int, top: int | None = None) -> TimedReply:
        from outrider import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=top)
        reply = TimedReply()
        output = self._llms[mode].generate([ids], params)[0].outputs[0]
        reply["first_s"] = output.timings.first_token_s
        if output.logprobs is not None:
            reply["top"] = [[(token, entry.logprob) for token, entry in position.items()] for position in output.logprobs]
        return reply.done(output.token_ids)


class Transformers:
    packages = ("transformers", "torch")

    def __init__(self, load: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(load["threads"])
        self._device = load.get("device", "cpu")
        options = {"dtype": getattr(torch, load["dtype"]), "local_files_only": True}
        self._model = AutoModelForCausalLM.from_pretrained(load["model"], **options).to(self._device).eval()
        self._model.generation_config.eos_token_id = None
        self._draft = None
        if load.get("draft"):
            self._draft = AutoModelForCausalLM.from_pretrained(load["draft"], **options).to(self._device).eval()
            self._draft.generation_config.eos_token_id = None
            self._default = self._draft.generation_config.num_assistant_tokens

    def generate(self, mode: str, ids: list[int], tokens: int) -> TimedReply:
        import torch

        name, _, number = mode.partition(":")
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        if name == "lookup":
            options["prompt_lookup_num_tokens"] = int(number)
        elif name == "draft":
            assert self._draft is not None
            self._draft.generation_config.num_assistant_tokens = int(number) if number else self._default
            options["assistant_model"] = self._draft
        elif name == "compiled":
            options["cache_implementation"] = "static"
        tokens_in = torch.tensor([ids], device=self._device)
        watch = _FirstToken(reply := TimedReply())
        with torch.inference_mode():
            out = self._model.generate(tokens_in, attention_mask=torch.ones_like(tokens_in), streamer=watch, **options)
        return reply.done(out[0, len(ids) :].tolist())


class _FirstToken:
    """A streamer that notes when the first token comes; the prompt is put before it."""

    def __init__(self, reply: TimedReply) -> None:
        self._reply, self._prompt_seen = reply, False

    def put(self, value: Any) -> None:  # noqa: ARG002
        if self._prompt_seen:
            self._reply.first()
        self._prompt_seen = True

    def end(self) -> None:
        pass


class LlamaCpp:
    packages = ("llama_cpp_python",)

    def __init__(self, load: dict[str, Any]) -> None:
        from llama_cpp import Llama

        threads = load["threads"]
        options = {"n_ctx": load["context"], "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        options["flash_attn"] = True  # llama.cpp's default, and faster; the binding switches it off
        options["use_mmap"] = False  # while others run, the system may drop pages of a mapped file
        self._models: dict[str, Any] = {}
        for mode in load["modes"]:
            name, _, number = mode.partition(":")
            drafter = None
            if name == "lookup":
                from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

                drafter = LlamaPromptLookupDecoding(num_pred_tokens=int(number))
            elif name == "draft":
                drafter = _drafting(Llama(load["draft"], **options), int(number))
            self._models[mode] = Llama(load["model"], draft_model=drafter, logits_all=drafter is not None, **options)

    def generate(self, mode: str, ids: list[int], tokens: int) -> TimedReply:
        model, reply, out = self._models[mode], TimedReply(), []
        model.reset()  # nothing of an earlier prompt is kept
        for token in model.generate(ids, temp=0.0):
            reply.first()
            out.append(int(token))
            if len(out) == tokens:
                break
        return reply.done(out)


def _drafting(model: Any, count: int) -> Any:
    """A draft model for llama-cpp-python, whose binding leaves writing one to its users."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Drafting(LlamaDraftModel):
        def __call__(self, input_ids: Any, **_: Any) -> Any:
            out: list[int] = []
            for token in model.generate([int(i) for i in input_ids], temp=0.0):
                out.append(int(token))
                if len(out) == count:
                    break
            return np.array(out, dtype=np.intc)

    return Drafting()


class OpenVINO:
    packages = ("openvino_genai", "openvino")

    def __init__(self, load: dict[str, Any]) -> None:
        import openvino_genai as genai

        options = {"INFERENCE_NUM_THREADS": load["threads"]}
        int8 = load["dtype"] == "INT8"
        model = _as_ir(load["model"], int8) if int8 else load["model"]
        self._pipes: dict[str, Any] = {}
        for mode in load["modes"]:
            name = mode.partition(":")[0]
            extra: dict[str, Any] = {}
            if name == "lookup":
                extra["prompt_lookup"] = True
            elif name == "draft":
                extra["draft_model"] = genai.draft_model(_as_ir(load["draft"], int8), "CPU", **options)
            self._pipes[mode] = genai.LLMPipeline(model, "CPU", **options, **extra)

    def generate(self, mode: str, ids: list[int], tokens: int) -> TimedReply:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        name, _, number = mode.partition(":")
        config = genai.GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)
        if number:
            config.num_assistant_tokens = int(number)
        if name == "lookup":
            config.max_ngram_size = 3
        tokens_in = np.array([ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(tokens_in), ov.Tensor(np.ones_like(tokens_in)))
        reply = TimedReply()
        result = self._pipes[mode].generate(inputs, config)
        reply.done([int(token) for token in result.tokens[0]])
        reply["first_s"] = result.perf_metrics.get_ttft().mean / 1e3
        return reply


def _as_ir(path: str, int8: bool) -> str:
    """A folder with the model of a GGUF file in OpenVINO's format, from which alone it reads int8 by channel and draft models."""
    import openvino_genai as genai

    folder = path.removesuffix(".gguf") + "-ir"
    os.makedirs(folder, exist_ok=True)
    link = os.path.join(folder, "model.gguf")
    if not os.path.exists(link):
        os.link(path, link)
        genai.LLMPipeline(link, "CPU", enable_save_ov_model=True)
    return _in_int8(folder) if int8 else folder


def _in_int8(folder: str) -> str:
    """The model with matrices as OpenVINO's compression writes them: int8 with a scale of every output channel."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    model = ov.Core().read_model(os.path.join(folder, "openvino_model.xml"))
    for wide in model.get_ops():
        stored = wide.input_value(0).get_node() if wide.get_type_name() == "Convert" else None
        if stored is None or stored.get_type_name() != "Constant" or len(stored.shape) != 2:
            continue
        matrix = np.array(stored.data, dtype=np.float32)
        scale = np.maximum(np.abs(matrix).max(1, keepdims=True) / 127, 1e-7).astype(np.float16)
        narrow = ops.convert(ops.constant(np.rint(matrix / scale.astype(np.float32)).astype(np.int8)), "f16")
        scaled = ops.convert(ops.multiply(narrow, ops.constant(scale)), "f32")
        for place in wide.output(0).get_target_inputs():
            place.replace_source_output(scaled.output(0))
    out = folder + "-int8"
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.gguf", "openvino_model.*"))
    ov.save_model(model, os.path.join(out, "openvino_model.xml"), compress_to_fp16=False)
    return out


ENGINES: dict[str, Any] = {"outrider": Outrider, "transformers": Transformers, "llama.cpp": LlamaCpp, "openvino": OpenVINO}


def main() -> None:
    """Serve one engine until standard input ends. Libraries that print write to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if engine is None:
                kind = ENGINES[message["peer"]]
                engine = kind(message)
                answer: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in kind.packages}}
                answer["versions"] |= getattr(engine, "versions", {})
            else:
                answer = engine.generate(**message)
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
