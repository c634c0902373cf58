// What the pages share: making elements, calling the server with its key, sizes and times in words.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

const headers = () => {
  const key = sessionStorage.getItem("muser-key");
  return key ? { "content-type": "application/json", authorization: `Bearer ${key}` } : { "content-type": "application/json" };
};

// Calls the server; asks for a key when it wants one.
async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.status !== 401) return response;
  if (!$("ask-key").open) $("ask-key").showModal();
  await new Promise((done) => $("ask-key").addEventListener("close", done, { once: true }));
  sessionStorage.setItem("muser-key", $("key").value);
  return fetch(path, { ...options, headers: headers() });
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

const bytes = (n) => (n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(2)} GiB` : `${(n / 2 ** 20).toFixed(1)} MiB`);
