// The box to write in, with its one button: send, or stop while an answer comes.

export class Composer {
  #form = document.getElementById("composer");
  #input = document.getElementById("prompt");
  #button = document.getElementById("send");
  #waiting = document.getElementById("send-waiting");
  #busy = false;
  #ready = false;
  #early = false; // Enter was pressed before the server was ready, and the text not changed since
  #send;
  #changed;

  /** send(text) returns whether it took the text; changed(text) is called whenever the user has changed it. */
  constructor({ send, stop, changed }) {
    this.#send = send;
    this.#changed = changed;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#busy) stop();
      else this.#submit();
    });
    this.#input.addEventListener("input", () => {
      this.takeBack();
      this.#changed(this.text);
    });
    this.#input.addEventListener("keydown", (event) => {
      // Enter that ends an input method's composition is not ours.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    document.addEventListener("keydown", (event) => {
      if (document.querySelector("dialog[open]") || event.target.closest("#chats-body")) return;
      if (event.key === "Escape" && this.#busy) stop();
      else if (event.key === "Escape") this.takeBack();
      else if (startsTyping(event)) this.focus();
    });
    this.#refresh();
  }

  get text() {
    return this.#input.value;
  }

  set text(text) {
    this.#input.value = text;
    this.takeBack();
  }

  focus() {
    this.#input.focus({ preventScroll: true });
  }

  /** Focuses only where that opens no on-screen keyboard, and takes the focus from nothing else. */
  focusWithKeyboard() {
    const { activeElement } = document;
    const idle = activeElement === document.body || this.#form.contains(activeElement);
    if (idle && window.matchMedia("(hover: hover)").matches) this.focus();
  }

  /** What was entered early waits to be entered again. */
  takeBack() {
    this.#early = false;
    this.#refresh();
  }

  setBusy(busy) {
    this.#busy = busy;
    this.#refresh();
  }

  setReady(ready, placeholder) {
    this.#ready = ready;
    this.#input.placeholder = placeholder;
    if (ready && this.#early) this.#submit();
    this.#refresh();
  }

  #submit() {
    const text = this.#input.value.trim();
    this.#early = !this.#ready && !this.#busy && text !== "";
    if (!this.#ready || this.#busy || text === "") return this.#refresh();
    if (this.#send(text)) this.#input.value = "";
    this.#refresh();
  }

  #refresh() {
    const label = this.#busy ? "Stop" : "Send";
    this.#form.classList.toggle("busy", this.#busy);
    if (!CSS.supports("field-sizing", "content")) this.#input.rows = Math.min(this.#input.value.split("\n").length, 8);
    this.#button.setAttribute("aria-label", label);
    this.#button.title = this.#busy ? "Stop (Esc)" : "Send (Enter)";
    this.#waiting.textContent = this.#early ? "Sent as soon as the model is ready. Escape or any change takes it back." : "";
    this.#button.disabled = !this.#busy && (!this.#ready || this.#input.value.trim() === "");
  }
}

/** A printable key pressed while nothing has the focus is meant for the composer. */
function startsTyping(event) {
  const printable = event.key.length === 1 && event.key !== " ";
  return printable && !event.ctrlKey && !event.metaKey && !event.altKey && document.activeElement === document.body;
}
