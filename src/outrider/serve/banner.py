"""The message that the server prints when it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.serve.settings import Settings

__all__ = ["describe", "written"]


def describe(llm: LLM, settings: Settings, address: tuple[str, int]) -> str:
    """The resolved settings, whether speculation is on and why, and example requests."""
    config, pages = llm.speculation, llm.engine.pages
    drafters = ", ".join(dict.fromkeys(name for name in config.methods() if name != config.method))
    if config.method == "none":
        speculation = "off: no method was asked for (--method auto chooses one)"
    elif config.method == "auto" and not drafters:
        speculation = "off: nothing to draft with was found"
    elif config.draft_tokens == 0:
        speculation = "off: --draft-tokens is 0"
    elif config.method == "auto":
        speculation = f"on: a controller chooses among {drafters} round by round, and drafts nothing where that does not pay"
    else:
        members = f" of {drafters}" if drafters else ""
        speculation = f"on: {config.method}{members}, up to {config.draft_tokens} tokens a round, rule {config.rule}"
    slots = llm.engine.scheduler.max_num_seqs
    url, key = f"http://{written(address)}", "$OUTRIDER_API_KEY" if settings.needs_key else ""
    header = f" -H 'Authorization: Bearer '\"{key}\"" if key else ""
    secret = "os.environ['OUTRIDER_API_KEY']" if key else "'none'"
    chats = llm.tokenizer is not None and llm.tokenizer.chat_template
    pool = llm.engine.runner.pool
    mib = (pool.keys.nbytes + pool.values.nbytes) / 2**20
    lines = [
        f"model         {settings.model_name} ({llm.directory})",
        f"speculation   {speculation}",
        f"context       {llm.max_model_len} tokens; {slots} sequences at once, {settings.max_queue} may wait",
        f"KV            {pages.count} pages of {pages.page_size} tokens, {mib:.0f} MiB",
        f"chat          {'yes' if chats else 'no: the model has no chat template; --chat-template gives it one'}",
        f"key           {'needed' if settings.needs_key else 'none; anybody who can reach the address is served'}",
        "",
        f"  curl {url}/v1/completions{header} -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{settings.model_name}", "prompt": "def main(", "max_tokens": 64}}\'',
        "",
        "  from openai import OpenAI",
        f"  client = OpenAI(base_url='{url}/v1', api_key={secret})",
        f"  client.completions.create(model='{settings.model_name}', prompt='def main(', max_tokens=64)",
        "",
        f"ready on {url}",
    ]
    return "\n".join(lines)


def written(address: tuple[str, int]) -> str:
    """An address as it stands in a URL."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
