// The list of messages: what is in it, and where it is scrolled to.

import { element } from "./dom.js";
import { MessageView } from "./message.js";

const NEAR_END_PX = 60;

export class Transcript {
  #list = document.getElementById("messages");
  #scroller = document.getElementById("scroller");
  #jump = document.getElementById("jump");
  #following = true;
  #reader;
  #views = [];
  #keys = []; // of each row that is shown, what is in it

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
    this.#list.classList.remove("side-by-side");
    this.#views = [];
    this.#keys = [];
    for (const row of rows) this.#add(row);
    this.follow();
  }

  /** The view of a message that is shown. */
  viewOf(message) {
    return this.#views.find((view) => view.message === message);
  }

  /** Draws what has changed, which mostly is that something has come to the end. The keyboard keeps its place. */
  update(rows) {
    const place = this.#placeOfFocus();
    this.#draw(rows);
    if (place && document.activeElement === document.body) this.#focus(place);
  }

  #draw(rows) {
    const isShown = (message, i) => this.#views[i] === undefined || this.#views[i].message === message;
    if (this.#keys.some((key, i) => key !== keyOf(rows[i])) || !rows.flat().every(isShown)) {
      this.show(rows);
      return;
    }
    for (const view of this.#views) view.refresh();
    for (const row of rows.slice(this.#keys.length)) this.#add(row);
    this.keepUp();
  }

  #add(row) {
    const place = (i) => (row.length > 1 ? `${i + 1} of ${row.length}` : "");
    const views = row.map((message, i) => new MessageView(message, this.#reader, place(i)));
    const nodes = views.map(({ node }) => node);
    if (row.length === 1) this.#list.append(...nodes);
    else this.#list.append(element("div", { class: "samples", role: "group", "aria-label": "Samples" }, ...nodes));
    this.#list.classList.toggle("side-by-side", row.length > 1);
    this.#views.push(...views);
    this.#keys.push(keyOf(row));
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

function keyOf(row) {
  return row?.map(({ id }) => id).join();
}
