// The block lab: every click runs one operation on a pool of this visitor's own on the server.

import { request } from "../api.js";
import { element } from "../dom.js";
import { untilKeyIsGiven } from "./locked.js";

const APPENDS = [1, 16, 64];
const GONE = "The pool was gone: unused for ten minutes, in the way of others, or the server has started anew. This is a new one.";
const byId = (id) => document.getElementById(id);

let poolId = null;
let queue = Promise.resolve(); // clicks are done one after the other

async function post(path, body) {
  for (;;) {
    try {
      return await (await request(path, { body })).json();
    } catch (error) {
      if (error.status !== 401) throw error;
      byId("said").textContent = "Waiting for the API key.";
      await untilKeyIsGiven();
    }
  }
}

async function begin() {
  const reply = await post("/v1/lab/pools", { block_size: blockSize() });
  poolId = reply.id;
  return reply;
}

/** Does one operation and draws what there is then. A pool that was forgotten meanwhile is begun anew. */
function step(body, after = () => {}) {
  if (body.do === "reset") byId("why").hidden = true;
  queue = queue.then(async () => {
    try {
      if (poolId === null) await begin();
      draw((await post(`/v1/lab/pools/${poolId}`, body)).pool);
      after();
    } catch (error) {
      const gone = error.code === "pool_not_found";
      if (gone) {
        poolId = null;
        draw((await begin()).pool);
      }
      byId("said").textContent = gone ? GONE : error.message;
      byId("said").classList.add("refused");
    }
  }).catch((error) => {
    byId("said").textContent = error.message;
  });
  return queue;
}

function blockSize() {
  return whole("block-size", 16);
}

/** The number in a field, brought into its bounds. */
function whole(id, otherwise) {
  const field = byId(id);
  const value = Math.trunc(Number(field.value)) || otherwise;
  field.value = String(Math.min(Math.max(value, Number(field.min)), Number(field.max)));
  return Number(field.value);
}

function draw(pool) {
  byId("said").textContent = pool.said;
  byId("said").classList.remove("refused");
  byId("code").hidden = pool.path.length === 0;
  byId("operation").textContent = pool.operation;
  byId("path").replaceChildren(
    ...pool.path.map(({ name, purpose }) => element("li", {}, element("code", {}, name), ` ${purpose}`)),
  );
  for (const name of ["used", "naive", "cached", "free", "copies"]) byId(name).textContent = String(pool[name]);
  byId("host").textContent = String(pool.host_used);
  byId("fragmentation").textContent = `${Math.round(pool.fragmentation * 100)} %`;
  byId("map").replaceChildren(...pool.blocks.map((block, number) => cell(block, number, pool)));
  drawSequences(pool);
}

/** Draws them with the focus where it was; where its button can do nothing now, on the next one that can. */
function drawSequences(pool) {
  const { sequence, act } = document.activeElement.dataset;
  byId("no-sequences").hidden = pool.sequences.length > 0;
  byId("sequences").replaceChildren(...pool.sequences.map((each) => card(each, pool)));
  if (act === undefined) return;
  const acts = [...byId("sequences").querySelectorAll(`[data-sequence="${sequence}"]:enabled`)];
  const next = acts.find((button) => Number(button.dataset.act) >= Number(act)) ?? byId("new-sequence");
  next.focus({ preventScroll: true });
}

function cell(block, number, { block_size: size, sequences }) {
  const holders = sequences.filter((each) => each.block_table.includes(number)).map((each) => each.id);
  const words = {
    free: "free",
    cached: "cached: no table names it, and its content can be found",
    active: `named by sequence ${holders.join(", ")}; ${block.tokens} of ${size} tokens${block.findable ? "; can be found" : ""}`,
  };
  const node = element(
    "li",
    { class: block.state, title: `Block ${number}, ${words[block.state]}`, "aria-label": `Block ${number}, ${words[block.state]}` },
    element("b", {}, block.state === "free" ? "" : String(block.references)),
    element("small", {}, String(number)),
  );
  node.style.setProperty("--filled", `${(100 * block.tokens) / size}%`);
  return node;
}

function card(sequence, pool) {
  const swapped = sequence.host_table.length > 0;
  const table = swapped ? sequence.host_table : sequence.block_table;
  const tokens = `${sequence.tokens} token${sequence.tokens === 1 ? "" : "s"}`;
  let acts = 0;
  const act = (label, body, off = false, name = label) =>
    element(
      "button",
      {
        type: "button",
        class: "plain",
        disabled: off,
        "data-sequence": sequence.id,
        "data-act": acts++,
        "aria-label": `${name}, sequence ${sequence.id}`,
        onclick: () => step({ sequence: sequence.id, ...body }),
      },
      label,
    );
  const node = element(
    "article",
    { class: "sequence", "aria-label": `Sequence ${sequence.id}` },
    element(
      "h3",
      {},
      `Sequence ${sequence.id}`,
      element("small", {}, sequence.parent === null ? tokens : `${tokens}, forked from ${sequence.parent}`),
    ),
    element(
      "div",
      { class: "bar" },
      ...APPENDS.map((count) => act(`+${count}`, { do: "append", tokens: count }, swapped, `Append ${count}`)),
      act("Fork", { do: "fork" }, swapped),
      act("Write to the last block", { do: "write_last" }, swapped || sequence.tokens === 0),
      act("Publish", { do: "publish" }, swapped),
      swapped ? act("Swap in", { do: "swap_in" }) : act("Swap out", { do: "swap_out" }, table.length === 0),
      act("Free", { do: "free" }),
    ),
    element(
      "p",
      { class: "table" },
      table.length === 0 ? "no blocks" : swapped ? "host blocks " : "blocks ",
      ...table.map((block) =>
        element("code", { class: !swapped && pool.blocks[block].references > 1 ? "shared" : null }, String(block)),
      ),
    ),
  );
  return node;
}

/** What the page says of the lesson's numbers, beside those of the pool. */
function explain(tokens) {
  byId("why").textContent =
    `The lesson says 12 blocks against 16. It really takes ${byId("used").textContent}, and ${byId("naive").textContent} without ` +
    "sharing, at 16 tokens a block: the prompt's 64 tokens fill 4 blocks, which all four beams name, and each beam " +
    `needs ${Math.ceil(tokens / 16)} of its own for its ${tokens} tokens, so 4 + 4 × ${Math.ceil(tokens / 16)}. 12 is right from 17 to 32 tokens, ` +
    "when each beam needs two. 16 is four copies of the prompt alone.";
  byId("why").hidden = false;
}

byId("new-sequence").addEventListener("click", () => {
  const text = byId("text").value;
  step({ do: "sequence", ...(text && { text }) });
});
byId("evict").addEventListener("click", () => step({ do: "evict" }));
byId("reset").addEventListener("click", () => step({ do: "reset", block_size: blockSize() }));
byId("block-size").addEventListener("change", () => step({ do: "reset", block_size: blockSize() }));
byId("beam-tokens").addEventListener("input", () => {
  byId("lesson-tokens").textContent = byId("beam-tokens").value || "10";
});
byId("lesson").addEventListener("click", () => {
  const tokens = whole("beam-tokens", 10);
  byId("lesson-tokens").textContent = String(tokens);
  byId("block-size").value = "16";
  step({ do: "reset", block_size: 16 });
  step({ do: "lesson", tokens }, () => explain(tokens));
});
window.addEventListener("pagehide", () => {
  if (poolId === null) return;
  request(`/v1/lab/pools/${poolId}`, { body: { do: "leave" }, keepalive: true }).catch(() => {});
  poolId = null; // a page that comes back from the browser's cache begins another
});

queue = begin().then(
  ({ pool }) => draw(pool),
  (error) => {
    byId("said").textContent = error.message;
  },
);
