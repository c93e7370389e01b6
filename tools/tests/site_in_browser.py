"""Scripts that a browser runs in the site's pages: one finds what is cut, another lists what search finds."""

from __future__ import annotations

#: Yields a line for each thing of a page that does not fit its width, or is too narrow to read.
CUT = """(() => {
  const cut = [], article = document.querySelector("article"), shown = document.documentElement.clientWidth;
  const said = (box) => `${box.tagName.toLowerCase()} ${box.textContent.trim().replace(/\\s+/g, " ").slice(0, 40)}`;
  const scrolls = (box) => box && box !== article && /auto|scroll/.test(getComputedStyle(box).overflowX);
  const within = (box) => {
    while (box && box !== article && !scrolls(box)) box = box.parentElement;
    return scrolls(box);
  };
  const width = document.documentElement.scrollWidth;
  if (width > shown) cut.push(`the page is ${width} wide`);
  if (!article) return cut;
  // Furo lets headings stand out by half a letter.
  const right = Math.min(shown, article.getBoundingClientRect().right + 10) + 1;
  for (const box of article.querySelectorAll("table, pre, img, svg, p, li, dt, h1, h2, h3, h4")) {
    const place = box.getBoundingClientRect();
    if (!place.width) continue;
    if (box.tagName === "TABLE") {
      if (place.right > right) cut.push(said(box) + ": the table is cut");
    } else if (place.right > right && !within(box)) cut.push(said(box) + ": beyond the page's edge");
    const inner = box.scrollWidth > box.clientWidth + 1;
    if (box.tagName === "PRE" && inner && !scrolls(box)) cut.push(said(box) + ": cut code");
  }
  for (const cell of article.querySelectorAll("td")) {
    if (cell.scrollWidth > cell.clientWidth + 1) cut.push(said(cell) + ": the cell is cut");
    const text = document.createRange();
    text.selectNodeContents(cell);
    if (cell.clientWidth && cell.clientWidth < 60 && text.getBoundingClientRect().height > 80)
      cut.push(said(cell) + ": a narrow cell");
  }
  return cut;
})()"""

#: Yields the titles and addresses of a search's first results, when it has ended.
FOUND = """new Promise((done) => {
  const look = () => {
    const links = [...document.querySelectorAll("#search-results li a")];
    const ended = /finished|did not match/.test(document.querySelector("#search-results p")?.textContent || "");
    ended || links.length > 12 ? done(links.map((link) => link.getAttribute("href"))) : setTimeout(look, 10);
  };
  look();
})"""
