// @ts-check
// Requests to the server. Every failure becomes an ApiError with a readable message.

export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function ask(path, body, signal) {
  let response;
  try {
    const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const url = new URL(path, document.baseURI);
    url.username = url.password = ""; // from an address with a key, which the browser sends as a header
    response = await fetch(url, { ...(body === undefined ? {} : post), signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = `The server answered ${response.status} ${response.statusText}`;
  try {
    message = JSON.parse(text).error.message;
  } catch (error) {
    /* not JSON, such as the page of a proxy: only the status is known */
  }
  const wait = Number.parseFloat(response.headers.get("Retry-After"));
  throw new ApiError(response.status, message, Number.isFinite(wait) ? wait : null);
}

export const get = async (path, signal) => (await ask(path, undefined, signal)).json();
export const post = async (path, body, signal) => (await ask(path, body, signal)).json();

// Stream tokens to `onPiece` as they are decoded -> the result.
export async function stream(path, body, signal, onPiece) {
  const response = await ask(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "The server closed the connection before the output was complete.");
    rest += value.replace(/\r/g, "");
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const text = event
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5))
        .join("\n");
      if (!text.trim()) continue;
      const data = JSON.parse(text);
      if (data.error) throw new ApiError(data.error.status, data.error.message);
      if (data.result) return data.result;
      onPiece(data.piece);
    }
  }
}

export const pause = (seconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(new DOMException("aborted", "AbortError"));
      },
      { once: true },
    );
  });

// Retry while the server is overloaded; `onWait` receives the seconds to wait.
export async function patiently(call, signal, onWait) {
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if (error.status !== 429 && error.status !== 503) throw error;
      const seconds = Math.min(60, Math.max(1, error.retryAfter ?? 2));
      onWait(seconds);
      await pause(seconds, signal);
    }
  }
}
