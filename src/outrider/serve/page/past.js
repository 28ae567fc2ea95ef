// The list of earlier conversations: open one, delete one, delete all.

import { conversations, remove, removeAll } from "./history.js";
import { el } from "./words.js";

const when = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

/** Fill the history's panel whenever it opens. */
export function connectHistory({ onOpen, onDelete }) {
  const panel = document.getElementById("history-panel");
  const fill = () => {
    const list = conversations();
    const rows = list.map((one) => el("li", {},
      named("past", () => (onOpen(one.id), panel.hidePopover()), el("span", {}, one.title), el("small", {}, when.format(one.changed))),
      named("quiet", () => (remove(one.id), onDelete(one.id), fill()), "Delete", `Delete “${one.title}”`)));
    const all = list.length ? named("quiet", () => (removeAll(), onDelete(null), fill()), "Delete all") : null;
    panel.replaceChildren(
      el("h2", {}, "Conversations"),
      list.length ? el("ul", {}, ...rows) : el("p", { class: "note" }, "None yet."),
      el("div", { class: "past-foot" }, el("p", { class: "note" }, "Kept in this browser only: the latest 40."), all));
  };
  panel.addEventListener("beforetoggle", (event) => event.newState === "open" && fill());
}

function named(kind, onClick, ...content) {
  const label = content.length > 1 && typeof content[1] === "string" ? content.pop() : null;
  const made = el("button", { type: "button", class: kind, "aria-label": label }, ...content);
  made.addEventListener("click", onClick);
  return made;
}
