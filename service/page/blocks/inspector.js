// The live pool: puts the stream, the history, the map and the panels together.

import { ApiError, request } from "../api.js";
import { element } from "../dom.js";
import { lines } from "../lines.js";
import { BlockCard } from "./card.js";
import { legendOf, paint, Palette } from "./colours.js";
import { History } from "./history.js";
import { untilKeyIsGiven } from "./locked.js";
import { BlockMap } from "./map.js";
import { PoolModel } from "./pool.js";
import { PrefixTree } from "./prefixes.js";
import { Requests } from "./requests.js";
import { Travel } from "./travel.js";
import { blockEvents, decodeUpdate, STATES } from "./updates.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const byId = (id) => document.getElementById(id);

const history = new History();
const map = new BlockMap(byId("map"), byId("map-box"), { paint: colour, chosen });
const card = new BlockCard(byId("block-card"), ask);
const requests = new Requests(focusOn, (place) => choose(place));
const prefixes = new PrefixTree(ask, (places) => focusOn(places), (place) => choose(place));
const travel = new Travel(history, { moved: show, show: (place) => choose(place) });

let palette = new Palette();
let focus = null; // a set of places, all others fade
let pinned = -1; // the block that was chosen for good
let frame = 0; // in which all is drawn again

function colour(pixels, model) {
  paint(pixels, model, byId("colour").value, palette, { now: model.at, runs: prefixes.byPlace(model), focus });
}

/** Draws in the next frame: what was before the page was open comes in a shower. */
function showSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    show();
  });
}

/** Draws everything as it is at the moment that is shown. */
function show() {
  const model = history.shown;
  map.show(model);
  showCounts(model);
  requests.show(model);
  card.refresh(model);
  travel.show();
}

function showCounts(model) {
  const [device, host] = [model.counts(), model.counts(true)];
  const rows = STATES.map((state, i) => [state === "transfer" ? "in transfer" : state, device[i]]).concat(
    model.numHostBlocks ? [["in host memory", model.numHostBlocks - host[0]]] : [],
    [["requests waiting", model.waiting]],
  );
  const counts = byId("counts");
  if (counts.childElementCount !== rows.length) {
    counts.replaceChildren(...rows.map(([word]) => element("div", {}, element("dt", {}, word), element("dd", {}))));
  }
  rows.forEach(([, count], i) => {
    counts.children[i].lastChild.textContent = count.toLocaleString("en");
  });
  byId("map").setAttribute(
    "aria-label",
    `Map of ${model.numBlocks} blocks: ${STATES.map((state, i) => `${device[i]} ${state}`).join(", ")}`,
  );
  byId("block-number").max = String(Math.max(0, model.size - 1));
}

function showLegend() {
  byId("legend").replaceChildren(
    ...legendOf(byId("colour").value, palette).map(([colour_, words]) => {
      const swatch = element("i", {});
      swatch.style.background = colour_;
      return element("span", {}, swatch, words);
    }),
  );
}

/** Only these places stand out; null: all. */
function focusOn(places) {
  focus = places === null ? null : new Set(places);
  map.repaint();
}

function chosen(place, lasting) {
  if (lasting) {
    pinned = place;
    map.mark(place);
  }
  const shown = place >= 0 ? place : pinned;
  card.show(shown, history.shown);
}

function choose(place) {
  pinned = place;
  map.reveal(place);
  card.show(place, history.shown);
}

/** A GET of JSON. */
async function ask(path) {
  return (await request(path)).json();
}

function link(phase, text) {
  byId("link").dataset.phase = phase;
  byId("link-text").textContent = text;
}

function take(event) {
  const update = decodeUpdate(event);
  const { newest } = history;
  if (!newest || newest.numBlocks !== update.num_blocks || newest.numHostBlocks !== update.num_host_blocks) {
    const model = new PoolModel();
    model.load(update);
    history.begin(model);
    show();
    return;
  }
  const differs = history.take(update);
  if (history.live && (differs || byId("colour").value === "age")) showSoon();
  else travel.show();
}

/** Follows the stream for as long as the page is visible, and comes back after a loss. */
async function follow() {
  for (let failures = 0; ; ) {
    const abort = new AbortController();
    const hide = () => document.hidden && abort.abort();
    const waits = (queued) => link("connecting", queued ? "waiting for answers in other windows" : "connecting");
    const read = async () => {
      // What was before the page was open is told once; a page that comes back has it.
      for await (const event of blockEvents(`past=${!history.newest}`, abort.signal)) {
        failures = 0;
        link("ready", "live");
        take(event);
      }
    };
    document.addEventListener("visibilitychange", hide);
    try {
      await untilVisible();
      await lines.run(read, abort.signal, waits);
    } catch (error) {
      if (error.status === 401) {
        link("locked", "locked");
        await untilKeyIsGiven();
        link("connecting", "connecting");
        continue;
      }
      if (error.name !== "AbortError") {
        if (!(error instanceof ApiError)) console.error(error);
        link(error.status === 503 && error.code !== "engine_dead" ? "loading" : "offline", error.message);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
  }
}

function untilVisible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
}

function newTheme() {
  palette = new Palette();
  map.palette = palette;
  showLegend();
}

byId("colour").addEventListener("change", () => {
  if (byId("colour").value === "prefix") prefixes.lookUp().then(() => map.repaint());
  showLegend();
  map.repaint();
});
byId("zoom-in").addEventListener("click", () => map.zoom(1.6));
byId("zoom-out").addEventListener("click", () => map.zoom(1 / 1.6));
byId("zoom-fit").addEventListener("click", () => map.fit());
byId("show-block").addEventListener("click", () => {
  const field = byId("block-number");
  if (field.reportValidity() && history.shown) choose(Number(field.value));
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", newTheme);
new MutationObserver(newTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
window.blockMap = map; // for whoever measures its frames
newTheme();
follow();
