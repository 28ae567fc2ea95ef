// What surrounds the views: which one is shown, the key, the theme, and whether the server is there.

import "./dashboard.js";
import { apiKey } from "./api.js";
import { meet } from "./playground.js";
import { browser } from "./storage.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];

function show() {
  const view = location.hash === "#server" ? "server" : "playground";
  for (const name of ["playground", "server"]) {
    $(`view-${name}`).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    name === view ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  $("dashboard").watch(view === "server");
}

function wear(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Theme: ${theme}`);
  $("theme").title = `Theme: ${theme}`;
  browser.set("outrider.theme", theme);
}

async function greet() {
  try {
    $("model").textContent = await meet();
    $("state").dataset.kind = "well";
    show();
  } catch (error) {
    $("model").textContent = error.status === 401 ? "key needed" : error.status === 503 ? "not ready" : "no answer";
    $("state").dataset.kind = "ill";
    if (error.status === 401) wantKey();
    else setTimeout(greet, 2000);
  }
}

function wantKey() {
  $("key-panel").showPopover();
  $("key").focus();
}

$("theme").addEventListener("click", () => wear(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set($("key").value.trim());
  $("key-panel").hidePopover();
  greet();
});
document.addEventListener("key-wanted", wantKey);
addEventListener("hashchange", show);

const stored = browser.get("outrider.theme");
wear(THEMES.includes(stored) ? stored : "auto");
$("key").value = apiKey.get();
show();
greet();
