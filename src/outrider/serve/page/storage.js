// What the browser keeps for the page. It may refuse: private windows, full quotas, policies.

class Shelf {
  #area;
  #here = new Map(); // what the browser would not keep lives as long as the page

  constructor(area) {
    this.#area = area; // a function, for even naming the storage may be forbidden
  }

  /** The stored value, or null. */
  get(key) {
    try {
      return this.#area().getItem(key) ?? this.#here.get(key) ?? null;
    } catch {
      return this.#here.get(key) ?? null;
    }
  }

  /** Whether the browser stores the value now. */
  set(key, value) {
    this.#here.delete(key);
    try {
      this.#area().setItem(key, value);
      return true;
    } catch {
      this.#here.set(key, value);
      return false;
    }
  }

  remove(key) {
    this.#here.delete(key);
    try {
      this.#area().removeItem(key);
    } catch {
      // nothing was kept there
    }
  }
}

/** Until it is deleted, for all tabs. */
export const browser = new Shelf(() => localStorage);
/** As long as the tab lives. */
export const tab = new Shelf(() => sessionStorage);
