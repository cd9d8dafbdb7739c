// The list of messages: what is in it, and where it is scrolled to.

import { MessageView } from "./message.js";

const NEAR_END_PX = 60;

export class Transcript {
  #list = document.getElementById("messages");
  #scroller = document.getElementById("scroller");
  #jump = document.getElementById("jump");
  #following = true;
  #reader;
  #views = [];

  /** `reader` is what each MessageView wants. */
  constructor(reader) {
    this.#reader = reader;
    this.#scroller.addEventListener("scroll", () => this.#setFollowing(this.#isAtEnd()), { passive: true });
    this.#jump.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.keepUp()).observe(this.#scroller);
  }

  show(messages) {
    this.#list.replaceChildren();
    this.#views = [];
    for (const message of messages) this.add(message);
    this.follow();
  }

  add(message) {
    const view = new MessageView(message, this.#reader);
    this.#list.append(view.node);
    this.#views.push(view);
    return view;
  }

  /** Draws what has changed, which mostly is that something has come to the end. */
  update(messages) {
    if (this.#views.some(({ message }, i) => message !== messages[i])) {
      this.show(messages);
      return;
    }
    for (const view of this.#views) view.refresh();
    for (const message of messages.slice(this.#views.length)) this.add(message);
    this.keepUp();
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

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  #setFollowing(following) {
    this.#following = following;
    this.#jump.hidden = following;
  }
}
