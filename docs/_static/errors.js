// On the page of errors, a field into which a message is pasted; below it, the rows that have most of its words.
document.addEventListener("DOMContentLoaded", () => {
  const title = document.querySelector("#errors h1");
  if (!title) return;
  const words = (text) => text.toLowerCase().match(/[a-z_]{2,}/g) || [];
  const rows = [...document.querySelectorAll("article tbody tr")].map((row) => ({
    row,
    words: [...new Set(words(row.cells[0].textContent))],
  }));
  const number = new Map(); // of rows that have a word: rare ones say more
  for (const { words } of rows) for (const word of words) number.set(word, (number.get(word) || 0) + 1);
  const weight = (list) => list.reduce((sum, word) => sum + Math.log(rows.length / number.get(word)), 0);

  const field = document.createElement("input");
  field.type = "search";
  field.className = "message";
  field.placeholder = "Paste a message, or some words of it";
  field.setAttribute("aria-label", field.placeholder);
  const found = document.createElement("table");
  found.className = "docutils align-default";
  title.after(field, found);
  field.addEventListener("input", () => {
    const pasted = new Set(words(field.value));
    const scored = rows.map(({ row, words }) => {
      const common = weight(words.filter((word) => pasted.has(word)));
      return [common && (common * common) / weight(words), row];
    });
    const best = scored.filter(([score]) => score > 0).sort(([a], [b]) => b - a);
    found.replaceChildren(...best.slice(0, 3).map(([, row]) => row.cloneNode(true)));
  });
  const asked = new URLSearchParams(location.search).get("message");
  if (asked) {
    field.value = asked;
    field.dispatchEvent(new Event("input"));
  }
});
