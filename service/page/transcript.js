// The list of messages: what is in it, and where it is scrolled to.

import { element } from "./dom.js";
import { MessageView } from "./message.js";

const NEAR_END_PX = 60;
const AT_ONCE = 12; // rows are built at once: the last ones before any is shown, then earlier ones frame by frame

export class Transcript {
  #list = document.getElementById("messages");
  #scroller = document.getElementById("scroller");
  #jump = document.getElementById("jump");
  #following = true;
  #reader;
  #rows = []; // of each row {messages, views, node}; the first ones may be unbuilt: they have no node yet
  #frame = 0; // in which the next of them are built

  /** `reader` is what each MessageView wants. */
  constructor(reader) {
    this.#reader = reader;
    this.#scroller.addEventListener("scroll", () => this.#setFollowing(this.#isAtEnd()), { passive: true });
    this.#jump.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.keepUp()).observe(this.#scroller);
  }

  /** Each row is a message, or the samples of an answer, which stand side by side. */
  show(rows) {
    this.#list.replaceChildren();
    this.#rows = rows.map(rowOf);
    for (const row of this.#rows.slice(-AT_ONCE)) this.#list.append(this.#build(row));
    this.#setWidth();
    this.#buildSoon();
    this.follow();
  }

  /** The view of a message that is shown. */
  viewOf(message) {
    return this.#views.find((view) => view.message === message);
  }

  get #views() {
    return this.#rows.flatMap(({ views }) => views);
  }

  /** Draws what has changed, from the first row on that is another one now. The keyboard keeps its place. */
  update(rows) {
    const place = this.#placeOfFocus();
    this.#draw(rows);
    if (place && document.activeElement === document.body) this.#focus(place);
  }

  #draw(rows) {
    const isSame = ({ messages }, row = []) => messages.length === row.length && messages.every((each, i) => each === row[i]);
    const at = this.#rows.findIndex((row, i) => !isSame(row, rows[i]));
    const kept = at < 0 ? this.#rows.length : at;
    for (const { node } of this.#rows.slice(kept)) node?.remove();
    if (!this.#list.hasChildNodes()) {
      this.show(rows);
      return;
    }
    this.#rows = this.#rows.slice(0, kept);
    this.#passOver();
    for (const view of this.#views) view.refresh();
    for (const row of rows.slice(kept).map(rowOf)) {
      this.#list.append(this.#build(row));
      this.#rows.push(row);
    }
    this.#setWidth();
    this.keepUp();
  }

  #build(row) {
    const { messages } = row;
    const place = (i) => (messages.length > 1 ? `${i + 1} of ${messages.length}` : "");
    row.views = messages.map((message, i) => new MessageView(message, this.#reader, place(i)));
    const nodes = row.views.map(({ node }) => node);
    const samples = () => element("div", { class: "samples", role: "group", "aria-label": "Samples" }, ...nodes);
    row.node = nodes.length === 1 ? nodes[0] : samples();
    return row.node;
  }

  #setWidth() {
    this.#list.classList.toggle("side-by-side", this.#rows.at(-1)?.messages.length > 1);
  }

  /** In the next frame: what was built for the last one has been laid out by then. */
  #buildSoon() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#buildEarlier());
  }

  /** What was laid out before and is far above the end costs nothing from now on while it is out of sight. */
  #passOver() {
    for (const { node } of this.#rows.slice(0, -AT_ONCE)) node?.classList.add("passed");
  }

  /** Builds some of the rows that are not built yet, the last ones first. What is seen stays where it is. */
  #buildEarlier() {
    const { scrollTop, scrollHeight } = this.#scroller; // first, while nothing has to be laid out for them
    this.#passOver();
    const unbuilt = this.#rows.filter(({ node }) => node === null);
    if (unbuilt.length === 0) return;
    this.#list.prepend(...unbuilt.slice(-AT_ONCE).map((row) => this.#build(row)));
    if (this.#following) this.keepUp();
    else if (scrollTop < 1 || !CSS.supports("overflow-anchor", "auto")) {
      this.#scroller.scrollTop = scrollTop + this.#scroller.scrollHeight - scrollHeight;
    }
    this.#buildSoon();
  }

  /** Goes to the end and stays there while text comes, until the reader scrolls up. */
  follow() {
    this.#setFollowing(true);
    this.keepUp();
  }

  keepUp() {
    if (!this.#list.hasChildNodes()) this.#scroller.scrollTop = 0; // the welcome is read from its beginning
    else if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    else this.#jump.hidden = this.#isAtEnd();
  }

  /** The button of a message at which the keyboard is; null if it is at none. A pointer needs no place to come back to. */
  #placeOfFocus() {
    const button = this.#list.querySelector("footer button:focus-visible");
    if (!button) return null;
    return { at: this.#views.findIndex(({ node }) => node.contains(button)), label: labelOf(button) };
  }

  /** One that is no longer there, or does nothing now, is followed by the first of the same message. */
  #focus({ at, label }) {
    const buttons = [...(this.#views.at(at) ?? this.#views.at(-1)).node.querySelectorAll("footer button:enabled")];
    (buttons.find((each) => labelOf(each) === label) ?? buttons[0])?.focus({ preventScroll: true });
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  #setFollowing(following) {
    this.#following = following;
    this.#jump.hidden = following;
  }
}

const labelOf = (button) => button.getAttribute("aria-label") ?? button.textContent;
const rowOf = (messages) => ({ messages, views: [], node: null });
