// JSON values in the browser's storage. A browser that refuses storage costs persistence, nothing else.

const QUOTA = ["QuotaExceededError", "NS_ERROR_DOM_QUOTA_REACHED"]; // the latter in older Firefoxes

export function load(key, fallback, storage = "localStorage") {
  try {
    const text = window[storage].getItem(key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Null if the browser keeps it, else why it does not: its storage is "full" or "forbidden". */
export function save(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, JSON.stringify(value));
    return null;
  } catch ({ name }) {
    return QUOTA.includes(name) ? "full" : "forbidden";
  }
}

export function remove(key, storage = "localStorage") {
  try {
    window[storage].removeItem(key);
  } catch {
    // Then it kept nothing either.
  }
}

/** The keys that begin with `prefix`. */
export function storedKeys(prefix, storage = "localStorage") {
  try {
    return Object.keys(window[storage]).filter((key) => key.startsWith(prefix));
  } catch {
    return [];
  }
}
