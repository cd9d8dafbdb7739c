// JSON values in the browser's storage. A browser that refuses storage costs persistence, nothing else.

export function load(key, fallback, storage = "localStorage") {
  try {
    const text = window[storage].getItem(key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function save(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, JSON.stringify(value));
  } catch {
    // Full or forbidden: the page goes on with what is in memory.
  }
}

export function remove(key, storage = "localStorage") {
  try {
    window[storage].removeItem(key);
  } catch {
    // As above.
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
