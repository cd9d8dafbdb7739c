// JSON values in the browser's storage. A browser that refuses storage costs persistence, nothing else.

export function load(key, fallback, storage = "localStorage") {
  try {
    const text = window[storage].getItem(key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** False if the browser does not keep it, since its storage is full or forbidden. */
export function save(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
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
