// Requests to the server. If it needs a token, the visitor enters it once; it is kept until the tab is closed.

const TOKEN = "ping-llm-token";
const memory = {};

function token() {
  try {
    return sessionStorage.getItem(TOKEN);
  } catch {
    return memory.token; // storage may be forbidden
  }
}

function keep(text) {
  memory.token = text;
  try {
    sessionStorage.setItem(TOKEN, text);
  } catch {
    // kept in memory
  }
}

class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const get = (path, parameters = {}, signal = undefined) => {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== ""));
  return ask(`${path}?${query}`, { signal });
};

export const post = (path, body, signal = undefined) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

export const send = (path, bytes, signal = undefined) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: bytes, signal });

async function ask(path, options, isAgain = false) {
  const headers = { ...options.headers };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  let reply;
  try {
    reply = await fetch(`/api/v1/${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it still running?", 0);
  }
  if (reply.status === 401) {
    await askForToken(isAgain || Boolean(token()));
    return ask(path, options, true);
  }
  const content = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Problem(content.error || `The server answered ${reply.status}.`, reply.status);
  return content;
}

let asking = null;

function askForToken(wasWrong) {
  asking ||= new Promise((resolve) => {
    const dialog = document.getElementById("token");
    const input = document.getElementById("token-text");
    document.getElementById("token-error").textContent = wasWrong ? "That token is wrong." : "";
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        keep(input.value.trim());
        input.value = "";
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}
