// @ts-check
// The state of the page in the fragment of its address, so that a link reproduces it. Browsers do not send fragments,
// so texts do not reach the logs of servers.

const LONGEST = 4000; // characters of a fragment that programs still treat as a link
const TYPING = 300; // milliseconds without a change until the address is written

export class Address {
  /**
   * @param {() => [string, string | null, string][]} state  [name, value, name on the page] of each part; null: not part of a link
   * @param {(parts: URLSearchParams) => void} restore
   * @param {(names: string[]) => void} tell  which parts are too long for an address
   */
  constructor(state, restore, tell) {
    this.state = state;
    this.tell = tell;
    this.timer = 0;
    window.addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== this.written) restore(this.read());
    });
  }

  read() {
    return new URLSearchParams(location.hash.slice(1));
  }

  changed() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), TYPING); // browsers limit the rate
  }

  write() {
    let parts = new URLSearchParams();
    const missing = new Set();
    for (const [name, value, label] of this.state()) {
      if (value === null) continue;
      const longer = new URLSearchParams(parts);
      longer.append(name, value.slice(0, LONGEST));
      if (String(longer).length < LONGEST) parts = longer;
      else missing.add(label);
    }
    this.written = String(parts);
    history.replaceState(null, "", `#${this.written}`);
    this.tell([...missing]);
  }
}
