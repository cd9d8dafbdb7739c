// The map of the KV cache's blocks, drawn from the server's metrics.

import { fetchMetrics } from "./api.js";
import { element } from "./dom.js";

const MAX_CELLS = 128;
const IDLE_MS = 2000;
const BUSY_MS = 400;
const STATES = ["active", "cached", "free"];

/** {active, cached, free, blockSize?} of the device tier; null when the server has no blocks yet. */
export function readBlocks(metrics) {
  const blocks = {};
  for (const line of metrics.split("\n")) {
    const sample = /^([a-zA-Z_:][\w:]*)\{(.*)\}\s+(\S+)/.exec(line);
    if (!sample) continue;
    const [, name, labelText, value] = sample;
    const labels = Object.fromEntries([...labelText.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
    if (name === "quire_kv_blocks" && labels.tier === "device" && STATES.includes(labels.state)) {
      blocks[labels.state] = Number(value);
    } else if (name === "vllm:cache_config_info" && labels.block_size) {
      blocks.blockSize = Number(labels.block_size);
    }
  }
  return STATES.every((state) => Number.isFinite(blocks[state])) ? blocks : null;
}

/** How many of `cells` each state gets: in proportion, but a state that has blocks has at least one. */
export function shareCells({ active, cached, free }, cells) {
  const total = active + cached + free;
  if (total === 0) return { active: 0, cached: 0, free: 0 };
  const share = (n) => (n > 0 ? Math.max(1, Math.round((n * cells) / total)) : 0);
  const shares = { active: share(active), cached: share(cached) };
  const most = cells - (free > 0 ? 1 : 0);
  while (shares.active + shares.cached > most) {
    if (shares.active > shares.cached) shares.active -= 1;
    else shares.cached -= 1;
  }
  if (free === 0) shares[active >= cached ? "active" : "cached"] += cells - shares.active - shares.cached;
  return { ...shares, free: cells - shares.active - shares.cached };
}

export class KvBar {
  #bar = document.getElementById("kv");
  #map = document.getElementById("kv-map");
  #size = document.getElementById("kv-size");
  #timer = 0;
  #polling = false;
  #busy = false;
  #lost;

  /** `lost` is called when the server cannot be reached. */
  constructor(lost) {
    this.#lost = lost;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** While an answer is being made the map is drawn more often. */
  setBusy(busy) {
    this.#busy = busy;
    this.poll();
  }

  /** Draws now, and again every while as long as the page is visible. */
  async poll() {
    clearTimeout(this.#timer);
    if (this.#polling || document.hidden) return;
    this.#polling = true;
    try {
      const blocks = readBlocks(await fetchMetrics(AbortSignal.timeout(5000)));
      if (blocks) this.#draw(blocks);
    } catch (error) {
      this.#bar.hidden = true;
      if (error.status === 0) this.#lost();
    } finally {
      this.#polling = false;
      this.#timer = setTimeout(() => this.poll(), this.#busy ? BUSY_MS : IDLE_MS);
    }
  }

  #draw(blocks) {
    const total = blocks.active + blocks.cached + blocks.free;
    const cells = Math.min(total, MAX_CELLS);
    const shares = shareCells(blocks, cells);
    const states = STATES.flatMap((state) => Array(shares[state]).fill(state));
    if (this.#map.childElementCount !== cells) {
      this.#map.replaceChildren(...states.map(() => element("i")));
    }
    states.forEach((state, i) => {
      const cell = this.#map.children[i];
      if (cell.className !== state) cell.className = state;
    });
    for (const state of STATES) {
      document.getElementById(`kv-${state}`).textContent = blocks[state].toLocaleString("en");
    }
    this.#size.textContent =
      `${total.toLocaleString("en")} blocks` + (blocks.blockSize ? ` of ${blocks.blockSize} tokens` : "");
    this.#map.setAttribute(
      "aria-label",
      `KV cache: ${blocks.active} blocks active, ${blocks.cached} cached, ${blocks.free} free, of ${total}`,
    );
    this.#bar.hidden = false;
  }
}
