// The card that shows what the server is doing before it can answer.

import { element } from "./dom.js";

const NAMES = {
  download: "Downloading the model",
  weights: "Loading the weights",
  memory: "Setting up KV memory",
  "warm-up": "Warming up",
  ready: "Ready",
};

export class StartupCard {
  #card = document.getElementById("startup");
  #title = document.getElementById("startup-title");
  #detail = document.getElementById("startup-detail");
  #bar = document.getElementById("startup-bar");
  #steps = document.getElementById("startup-steps");
  #seen = new Map(); // phase → seconds

  /** Shows a connection state; the card hides itself once the server is ready. */
  show({ phase, progress, message }) {
    this.#card.hidden = phase === "ready" || phase === "connecting";
    this.#card.classList.toggle("offline", phase === "offline");
    if (phase === "offline") {
      this.#seen.clear();
      this.#title.textContent = "Not connected";
      this.#detail.textContent = message;
      this.#steps.replaceChildren();
    } else if (phase === "loading" && progress) {
      this.#progress(progress);
    } else if (phase === "loading") {
      this.#title.textContent = "The server is not ready yet";
      this.#detail.textContent = "";
      this.#bar.removeAttribute("value");
    }
  }

  #progress({ phase, done, total, unit, seconds }) {
    this.#seen.delete(phase); // so that it comes last
    this.#seen.set(phase, seconds);
    this.#title.textContent = NAMES[phase] ?? phase;
    this.#detail.textContent = total > 0 ? `${amount(done, unit)} of ${amount(total, unit)}` : "";
    if (total > 0) {
      this.#bar.max = total;
      this.#bar.value = done;
    } else {
      this.#bar.removeAttribute("value"); // moving, with no end known
    }
    const earlier = [...this.#seen].filter(([name]) => name !== phase);
    this.#steps.replaceChildren(...earlier.map(([name, took]) => element("li", {}, `${NAMES[name] ?? name} · ${took.toFixed(1)} s`)));
  }
}

function amount(n, unit) {
  if (unit !== "bytes" && unit !== "B") return `${n.toLocaleString("en")} ${unit}`;
  if (n < 1e6) return `${(n / 1e3).toFixed(0)} kB`;
  return n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`;
}
