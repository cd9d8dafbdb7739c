// The card that stands on the page while the server's API key is not given.

import { askForKey } from "../keyprompt.js";

const card = document.getElementById("locked");
const unlock = document.getElementById("unlock");

/** Asks for the key; where it is not given, again whenever the button is pressed, until it is. */
export async function untilKeyIsGiven() {
  while (!(await askForKey())) {
    card.hidden = false;
    await new Promise((resolve) => {
      unlock.addEventListener("click", resolve, { once: true });
    });
  }
  card.hidden = true;
}
