// The controls of time travel, the list of moves, and the export.

import { element } from "../dom.js";
import { traceOf } from "./trace.js";

const MOST_MOVES = 60;
const PLAY_MS = 250;
const WORDS = {
  allocate: (m) => `allocate block ${m.block}`,
  hit: (m) => `found block ${m.block} in the cache`,
  fork: (m) => `share block ${m.block}`,
  release: (m) => `give back block ${m.block}`,
  copy: (m) => `copy block ${m.other} to ${m.block} before a write`,
  swap_out: (m) => `copy block ${m.block} out to host block ${m.other}`,
  swap_in: (m) => `bring host block ${m.other} in to block ${m.block}`,
  publish: (m) => `publish block ${m.block}`,
  evict: (m) => `evict block ${m.block}`,
};
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
const byId = (id) => document.getElementById(id);

export class Travel {
  #history;
  #moved;
  #show;
  #timer = 0;
  #drawn = null;

  constructor(history, { moved, show }) {
    this.#history = history;
    this.#moved = moved;
    this.#show = show;
    byId("step-back").addEventListener("click", () => this.#seek(history.position - 1));
    byId("step-on").addEventListener("click", () => this.#seek(history.position + 1));
    byId("scrub").addEventListener("input", () => this.#seek(Number(byId("scrub").value)));
    byId("go-live").addEventListener("click", () => {
      this.#stop();
      if (!history.shown) return;
      history.goLive();
      moved();
    });
    byId("play").addEventListener("click", () => (this.#timer ? this.#stop() : this.#play()));
    byId("export").addEventListener("click", () => this.#export());
  }

  #seek(position) {
    this.#stop();
    this.#go(position);
  }

  #go(position) {
    if (!this.#history.shown) return;
    this.#history.seek(position);
    this.#moved();
  }

  /** Plays on from the moment that is shown, as fast as it was; from the beginning, if that is the last. */
  #play() {
    if (!this.#history.shown || this.#history.length === 0) return;
    if (this.#history.live || this.#history.position === this.#history.length) this.#go(0);
    this.#timer = setInterval(() => {
      this.#go(this.#history.after(PLAY_MS / 1000));
      if (this.#history.position < this.#history.length) return;
      this.#stop();
      this.show();
    }, PLAY_MS);
    this.show();
  }

  #stop() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  show() {
    const { length, position, live, shown, newest } = this.#history;
    const scrub = byId("scrub");
    scrub.max = String(length);
    scrub.value = String(position);
    byId("play").textContent = this.#timer ? "Pause" : "Play";
    byId("go-live").disabled = live;
    const ago = newest && shown ? newest.at - shown.at : 0;
    const text = live ? `Live, with ${length} moments to go back to.` : `${CLOCK.format(shown.at * 1000)}, ${ago.toFixed(1)} s before the newest; moment ${position} of ${length}.`;
    scrub.setAttribute("aria-valuetext", text);
    // A live region that spoke four times a second would drown everything else.
    if (!live || byId("moment").dataset.live !== "true") byId("moment").textContent = text;
    else byId("moment").firstChild.data = text;
    byId("moment").dataset.live = String(live);
    byId("moment").setAttribute("aria-live", live ? "off" : "polite");
    this.#list();
  }

  #list() {
    const moves = this.#history.moves(MOST_MOVES);
    if (moves[0] === this.#drawn && moves.length) return;
    this.#drawn = moves[0] ?? null;
    byId("moves").replaceChildren(
      ...moves.map((move) => {
        const whose = move.request >= 0 ? ` for request ${move.request}` : "";
        return element(
          "li",
          { class: move.kind },
          element("time", {}, CLOCK.format(move.at * 1000)),
          element("button", { type: "button", class: "move", onclick: () => this.#show(move.block) }, `${WORDS[move.kind](move)}${whose}`),
        );
      }),
    );
  }

  #export() {
    if (!this.#history.newest) return;
    const blob = new Blob([JSON.stringify(traceOf(this.#history))], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(blob), download: "quire-blocks.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}
