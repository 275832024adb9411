// UTF-8, written out: not every JavaScript engine has TextEncoder and TextDecoder.

export function encodeUtf8(text) {
  const out = [];
  for (const letter of text) {
    const code = letter.codePointAt(0) >= 0xd800 && letter.codePointAt(0) < 0xe000 ? 0xfffd : letter.codePointAt(0); // half of a pair is no text
    if (code < 0x80) out.push(code);
    else if (code < 0x800) out.push(0xc0 | (code >> 6), 0x80 | (code & 63));
    else if (code < 0x10000) out.push(0xe0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63));
    else out.push(0xf0 | (code >> 18), 0x80 | ((code >> 12) & 63), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63));
  }
  return out;
}

// How many bytes a character has that begins so, and what its second byte may be: [length, lowest, highest].
function sequence(lead) {
  if (lead < 0x80) return [1, 0, 0];
  if (lead >= 0xc2 && lead < 0xe0) return [2, 0x80, 0xbf];
  if (lead >= 0xe0 && lead < 0xf0) return [3, lead === 0xe0 ? 0xa0 : 0x80, lead === 0xed ? 0x9f : 0xbf];
  if (lead >= 0xf0 && lead < 0xf5) return [4, lead === 0xf0 ? 0x90 : 0x80, lead === 0xf4 ? 0x8f : 0xbf];
  return [0, 0, 0];
}

// Bytes as text; broken(bytes) is what stands for the beginning of a character that does not go on.
export function decodeUtf8(bytes, broken = () => "\ufffd") {
  let text = "";
  for (let at = 0; at < bytes.length;) {
    const [length, low, high] = sequence(bytes[at]);
    let end = at + 1;
    while (end < at + length && end < bytes.length && bytes[end] >= (end === at + 1 ? low : 0x80) && bytes[end] <= (end === at + 1 ? high : 0xbf)) end++;
    if (end - at === length) {
      let code = length === 1 ? bytes[at] : bytes[at] & (0x7f >> length);
      for (let i = at + 1; i < end; i++) code = (code << 6) | (bytes[i] & 63);
      text += String.fromCodePoint(code);
    } else text += broken(Array.from(bytes.slice(at, end)));
    at = end;
  }
  return text;
}
