// Copying text, also where the browser has no clipboard for the page: plain http from another machine.

import { el } from "./words.js";

/** Whether the text is on the clipboard now. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // there is no clipboard, or it was refused
  }
}

/** The old way: the browser copies what is selected. */
function copySelected(text) {
  const area = el("textarea", { class: "unseen", readonly: true, "aria-hidden": "true", tabindex: -1 });
  const focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  try {
    area.focus({ preventScroll: true });
    area.select();
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    area.remove();
    focused?.focus?.({ preventScroll: true });
  }
}

/** A button that copies what `text()` gives and says whether it worked; `onFailure` may select the text instead. */
export function copyButton(text, onFailure) {
  const button = el("button", { type: "button", class: "quiet", "aria-live": "polite" }, "Copy");
  let timer = 0;
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied: selected, press Ctrl C";
    button.classList.toggle("failed", !copied);
    if (!copied) onFailure();
    clearTimeout(timer);
    timer = setTimeout(() => ((button.textContent = "Copy"), button.classList.remove("failed")), copied ? 1200 : 6000);
  });
  return button;
}

/** Select an element's text, so that the keyboard can copy it. */
export function selectText(node) {
  const range = document.createRange();
  range.selectNodeContents(node);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}
