// HTML to DOM nodes by DOMPurify. Nothing else on this page parses HTML.

import DOMPurify from "./vendor/dompurify-3.4.18/purify.es.mjs";

const ATTRIBUTES = ["href", "class", "start", "type", "checked", "disabled", "data-language"];
const ALLOWED = {
  ALLOWED_TAGS: (
    "a blockquote br code del div em h3 h4 h5 h6 hr input li ol p pre s span strong table tbody td th thead tr ul #text"
  ).split(" "),
  ALLOWED_ATTR: ATTRIBUTES,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ATTRIBUTES.slice(1),
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment with what is allowed of the HTML. */
export function sanitised(html) {
  return DOMPurify.sanitize(html, ALLOWED);
}
