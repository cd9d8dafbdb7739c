// The card that shows what the server is doing before it can answer.

import { element } from "./dom.js";

const NAMES = {
  download: "Downloading the model",
  weights: "Loading the weights",
  kernels: "Compiling kernels",
  memory: "Setting up KV memory",
  "warm-up": "Warming up",
};

export class StartupCard {
  #card = document.getElementById("startup");
  #title = document.getElementById("startup-title");
  #detail = document.getElementById("startup-detail");
  #bar = document.getElementById("startup-bar");
  #steps = document.getElementById("startup-steps");
  #unlock = document.getElementById("unlock");
  #seen = new Map(); // phase → seconds

  /** `unlock` is called when the user wants to give the API key after all. */
  constructor(unlock) {
    this.#unlock.addEventListener("click", unlock);
  }

  /** Shows a connection state; the card hides itself once the server is ready. */
  show({ phase, progress, message }) {
    this.#card.hidden = phase === "ready" || phase === "connecting";
    this.#card.dataset.phase = phase;
    this.#unlock.hidden = phase !== "locked";
    if (phase === "offline" || phase === "locked") {
      this.#seen.clear();
      this.#steps.replaceChildren();
      this.#title.textContent = phase === "locked" ? "This server asks for an API key" : "Not connected";
      this.#detail.textContent = message ?? "";
    } else if (phase === "loading" && progress) {
      this.#progress(progress);
    } else if (phase === "loading") {
      this.#title.textContent = "Not ready yet";
      this.#detail.textContent = message;
      this.#bar.removeAttribute("value");
    }
  }

  #progress({ phase, done, total, unit, seconds }) {
    this.#seen.delete(phase); // so that it comes last
    this.#seen.set(phase, seconds);
    this.#title.textContent = NAMES[phase] ?? phase;
    this.#detail.textContent = total > 0 ? howMuch(done, total, unit) : "";
    if (total > 0) {
      this.#bar.max = total;
      this.#bar.value = done;
    } else {
      this.#bar.removeAttribute("value"); // moving, with no end known
    }
    const earlier = [...this.#seen].filter(([name]) => name !== phase);
    const items = earlier.map(([name, took]) => element("li", {}, `${NAMES[name] ?? name} · ${took.toFixed(1)} s`));
    this.#steps.replaceChildren(...items);
  }
}

function howMuch(done, total, unit) {
  if (unit === "bytes" || unit === "B") return `${bytes(done)} of ${bytes(total)}`;
  return `${done.toLocaleString("en")} of ${total.toLocaleString("en")} ${unit}`;
}

function bytes(n) {
  if (n < 1e6) return `${(n / 1e3).toFixed(0)} kB`;
  return n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`;
}
