// Where the time of an answer went, as the server tells it: a small table, and why in words.

import { request } from "./api.js";
import { element } from "./dom.js";

/** What to show for a request of this page; in words where the server has nothing to tell. */
export async function whyOf(requestId) {
  let why;
  try {
    why = await (await request(`/v1/requests/${encodeURIComponent(requestId)}/why`)).json();
  } catch (error) {
    const gone = error.status === 404;
    return element("p", { class: "note" }, gone ? "The server does not know this request any more." : error.message);
  }
  const spans = why.spans.map(({ name, ms, tokens, steps }) =>
    row(name.replaceAll("_", " "), duration(ms), [amount(tokens, "token"), amount(steps, "step")].filter(Boolean).join(", ")),
  );
  const table = element("table", {}, element("caption", {}, "Where the time went"));
  table.append(
    element("thead", {}, element("tr", {}, ...["What", "Time", "Work"].map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...spans, row("all", duration(why.total_ms), "")),
  );
  const causes = why.causes.map(({ text }) => element("li", {}, text));
  return element("div", {}, table, causes.length > 0 ? element("ul", {}, ...causes) : "");
}

function row(name, time, work) {
  return element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "right" }, time), element("td", {}, work));
}

const amount = (n, noun) => (n ? `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}` : "");
const duration = (ms) => (ms < 1000 ? `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
