// Chat and status over the same public routes that any client uses. Text from the model only ever becomes text nodes.
"use strict";

let conversation = [];
let running = null;
let sees = false;
// Images that the next message shows, as data URLs.
let images = [];

// Fenced and inline code become elements, all else stays plain text.
function render(target, text) {
  target.replaceChildren();
  text.split(/^```/m).forEach((part, index) => {
    if (index % 2 === 1) {
      const body = part.replace(/^[^\n]*\n?/, "").replace(/\n$/, "");
      target.append(make("pre", "", body));
      return;
    }
    part.split(/`([^`\n]+)`/).forEach((piece, inner) => {
      if (piece) target.append(inner % 2 === 1 ? make("code", "", piece) : document.createTextNode(piece));
    });
  });
}

// Yields the data objects of an event stream.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split("\n")) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }
}

// What makes the prompt; a session is saved with the same, so that going on finds its prefix.
function prompt() {
  const system = $("system").value.trim();
  const body = { messages: system ? [{ role: "system", content: system }, ...conversation] : conversation };
  if ($("effort").value) body.reasoning_effort = $("effort").value;
  return body;
}

function request() {
  const body = { model: "", ...prompt(), stream: true, stream_options: { include_usage: true } };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max").value !== "") body.max_tokens = Number($("max").value);
  return body;
}

function answerView() {
  const view = make("article", "assistant");
  const thoughts = make("details");
  thoughts.hidden = true;
  const summary = make("summary", "", "Thinking…");
  const thoughtText = make("div");
  thoughts.append(summary, thoughtText);
  const text = make("div", "text busy");
  const meta = make("div", "meta");
  view.append(thoughts, text, meta);
  $("log").append(view);
  return { thoughts, summary, thoughtText, text, meta };
}

// A data URL as an element; anything else would be fetched, so it is not shown.
function picture(url) {
  const image = make("img");
  image.alt = "image";
  if (url.startsWith("data:image/")) image.src = url;
  return image;
}

// The content of a message is text, or parts with images.
function questionView(content) {
  $("empty")?.remove();
  const own = make("div", "user");
  const body = make("div");
  for (const part of typeof content === "string" ? [{ type: "text", text: content }] : content) {
    if (part.type === "image_url") body.append(picture(part.image_url.url));
    else body.append(document.createTextNode(part.text));
  }
  own.append(body);
  $("log").append(own);
}

function showImages() {
  $("images").hidden = images.length === 0;
  $("images").replaceChildren(...images.map((url, index) => {
    const item = make("div", "thumb");
    const remove = make("button", "", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", "Leave this image out");
    remove.addEventListener("click", () => {
      images.splice(index, 1);
      showImages();
    });
    item.append(picture(url), remove);
    return item;
  }));
}

async function addImages(files) {
  const read = (file) => new Promise((done, fail) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => fail(reader.error));
    reader.readAsDataURL(file);
  });
  for (const file of [...files].filter((file) => file.type.startsWith("image/"))) {
    images.push(await read(file));
  }
  showImages();
  $("input").focus();
}

async function ask(question) {
  const shown = images.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = shown.length ? [...shown, { type: "text", text: question }] : question;
  images = [];
  showImages();
  questionView(content);
  conversation.push({ role: "user", content });

  const view = answerView();
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const begun = performance.now();
  let first = 0, thoughtDone = 0, pieces = 0, text = "", reasoning = "", usage = null, timings = null, finish = "";
  const follow = () => {
    const log = $("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
  };
  let drawing = false;
  const draw = () => {
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => {
      drawing = false;
      view.thoughts.hidden = !reasoning;
      view.thoughtText.textContent = reasoning;
      render(view.text, text);
      follow();
    });
  };
  try {
    const response = await call("v1/chat/completions", {
      method: "POST", body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const { reasoning_content: thought, content: said } = choice.delta;
      if (!thought && !said) continue;
      const now = performance.now();
      if (!first) {
        first = now;
        watch();
        $("first").textContent = seconds(first - begun);
      }
      pieces += 1;
      if (pieces > 1) $("rate").textContent = ((pieces - 1) / ((now - first) / 1000)).toFixed(1);
      if (thought) reasoning += thought;
      if (said) {
        if (reasoning && !thoughtDone) {
          thoughtDone = now;
          view.summary.textContent = `Thought for ${seconds(now - first)}`;
        }
        text += said;
      }
      draw();
    }
  } catch (fault) {
    if (fault.name === "AbortError") finish = "stopped";
    else view.meta.before(make("p", "fault", fault.message));
  }
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  view.text.classList.remove("busy");
  if (reasoning && !thoughtDone) view.summary.textContent = "Thoughts";
  draw();
  const facts = [];
  if (usage) {
    facts.push(`${usage.completion_tokens} tokens`);
    const rate = timings?.predicted_per_second;
    if (rate) {
      facts.push(`${rate.toFixed(1)} tokens/s`);
      $("rate").textContent = rate.toFixed(1);
    }
    const { cached_tokens: cached, image_tokens: seen } = usage.prompt_tokens_details;
    facts.push(`${usage.prompt_tokens} in the prompt${seen ? ` (${seen} of images)` : ""}, ${cached} cached`);
    $("cached").textContent = usage.prompt_tokens ? `${Math.round((100 * cached) / usage.prompt_tokens)} %` : "–";
  }
  if (first) facts.push(`first after ${seconds(first - begun)}`);
  if (finish === "length") facts.push("cut at the limit");
  if (finish === "stopped") facts.push("stopped");
  view.meta.textContent = facts.join(" · ");
  conversation.push({ role: "assistant", content: text, ...(reasoning && { reasoning_content: reasoning }) });
  $("input").focus();
  watch();
}

async function said(path, method, body) {
  const response = await call(path, { method, ...(body && { body: JSON.stringify(body) }) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error?.message ?? response.statusText);
  return answer;
}

const sessionPath = (name) => `v1/sessions/${encodeURIComponent(name)}`;

// Does something with sessions, says how it went, and shows the list as it is then.
async function withSessions(work) {
  let note = "";
  try {
    note = await work();
  } catch (fault) {
    note = fault.message;
  }
  $("kept-text").textContent = note;
  const list = (await said("v1/sessions", "GET").catch(() => ({ data: [] }))).data;
  $("sessions").replaceChildren(...list.map((session) => {
    const item = make("li");
    const load = make("button", "", session.name);
    load.title = `${session.message_count} messages, ${session.tokens} tokens`;
    load.addEventListener("click", () => withSessions(() => loadSession(session.name)));
    const remove = make("button", "", "×");
    remove.setAttribute("aria-label", `Delete ${session.name}`);
    remove.addEventListener("click", () => withSessions(async () => {
      await said(sessionPath(session.name), "DELETE");
      return `${session.name} is deleted`;
    }));
    item.append(load, remove);
    return item;
  }));
}

async function saveSession(name) {
  let saved;
  try {
    saved = await said("v1/sessions", "POST", { name, ...prompt() });
  } catch (fault) {
    if (!fault.message.includes("save to it")) throw fault;
    saved = await said(`${sessionPath(name)}/save`, "POST", prompt());
  }
  return saved.pack ? `${name}: ${saved.pack.tokens} of ${saved.tokens} tokens kept, ${bytes(saved.pack.bytes)}` : `${name} is kept`;
}

async function loadSession(name) {
  running?.abort();
  const session = await said(`${sessionPath(name)}/restore`, "POST");
  const [first, ...rest] = session.messages;
  $("system").value = first?.role === "system" ? first.content : "";
  conversation = first?.role === "system" ? rest : session.messages;
  $("effort").value = session.reasoning_effort ?? "";
  $("log").replaceChildren();
  for (const message of conversation) {
    if (message.role === "user") {
      questionView(message.content);
      continue;
    }
    const view = answerView();
    view.text.classList.remove("busy");
    view.thoughts.hidden = !message.reasoning_content;
    view.summary.textContent = "Thoughts";
    view.thoughtText.textContent = message.reasoning_content ?? "";
    render(view.text, message.content ?? "");
  }
  const { prompt_tokens: tokens, prompt_tokens_details: { cached_tokens: cached, restored_tokens: restored } } = session.usage;
  return `${name}: ${tokens} tokens, ${cached} cached, ${restored} of them from disk, ${seconds(session.restore_ms)}`;
}

function showStatus(status) {
  $("model").textContent = `${status.model.name} · ${status.model.context_tokens.toLocaleString("en")} tokens`;
  $("device").textContent = status.device;
  $("device").title = status.device;
  $("waiting").textContent = status.waiting;
  sees = status.model.sees;
  $("attach").hidden = !sees;
  const list = status.slots.map((slot) => {
    const item = make("li");
    const reading = slot.busy && slot.processed_tokens < slot.prompt_tokens;
    const state = !slot.busy ? "idle" : reading ? "reading" : "writing";
    const held = slot.processed_tokens + slot.generated_tokens;
    const bar = make("div", "bar");
    const fill = make("i");
    fill.style.width = `${slot.busy ? Math.min(100, (100 * held) / status.model.context_tokens) : 0}%`;
    bar.append(fill);
    item.append(make("span", "", `${slot.id} ${state}`), make("span", "", slot.busy ? `${held} tokens` : ""), bar);
    return item;
  });
  $("slots").replaceChildren(...list);
  const { used_bytes: used, kept_bytes: kept, total_bytes: total } = status.kv;
  $("kv-used").style.width = `${total ? (100 * used) / total : 0}%`;
  $("kv-kept").style.width = `${total ? (100 * kept) / total : 0}%`;
  if (status.packs && $("kept").hidden) {
    $("kept").hidden = false;
    withSessions(async () => `${status.packs.count} packs, ${bytes(status.packs.bytes)} on disk`);
  }
  $("kv-text").textContent = `${bytes(used)} in use, ${bytes(kept)} kept for reuse, of ${bytes(total)}`;
}

async function look() {
  try {
    const response = await call("status");
    if (response.ok) showStatus(await response.json());
    else $("model").textContent = response.status === 503 ? "loading the model…" : `error ${response.status}`;
  } catch {
    $("model").textContent = "no connection";
  }
}

let nextLook = 0;
async function watch() {
  clearTimeout(nextLook);
  if (!document.hidden) await look();
  clearTimeout(nextLook);
  nextLook = setTimeout(watch, running ? 500 : 1500);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("input").value.trim();
  if ((!question && !images.length) || running) return;
  $("input").value = "";
  $("input").style.height = "";
  ask(question);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("input").addEventListener("input", () => {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
});
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  addImages($("file").files);
  $("file").value = "";
});
$("input").addEventListener("paste", (event) => {
  if (!sees || !event.clipboardData?.files.length) return;
  event.preventDefault();
  addImages(event.clipboardData.files);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("chat").addEventListener(kind, (event) => {
    if (!sees) return;
    event.preventDefault();
    $("form").classList.toggle("over", kind === "dragover");
    if (kind === "drop") addImages(event.dataTransfer.files);
  });
}
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  images = [];
  showImages();
  $("log").replaceChildren();
  $("input").focus();
});
$("keep").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = $("keep-name").value.trim();
  if (name && !running) withSessions(() => saveSession(name));
});
$("toggle").addEventListener("click", () => {
  const side = $("side");
  side.hidden = !side.hidden;
  $("toggle").setAttribute("aria-expanded", String(!side.hidden));
});
if (matchMedia("(max-width: 760px)").matches) $("side").hidden = true;
watch();
