// Example measurements to try the page: eight nodes, one pair that was never measured, and a congestion of three hours.

const PLACES = [[0, 0], [9, 4], [16, -6], [31, 8], [44, 2], [58, -9], [70, 12], [88, 5]];

export const SOURCE = "192.0.2.1";
export const DESTINATION = "192.0.2.70";

export function exampleText() {
  const lines = ["event_time,src_addr,dst_addr,rtt"];
  let seed = 7;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const begin = Date.UTC(2025, 2, 3) / 1000;
  for (let hour = 0; hour < 24; hour++) {
    for (let one = 0; one < PLACES.length; one++) {
      for (let other = one + 1; other < PLACES.length; other++) {
        if ((one === 0 && other === 6) || (hour + one * 3 + other) % 4) continue;
        const [x, y] = [0, 1].map((axis) => PLACES[one][axis] - PLACES[other][axis]);
        const isBad = hour >= 15 && hour < 18 && other === 7;
        const rtt = (2 + Math.hypot(x, y) * 1.1 + one + other) * (1 + 0.06 * random() ** 3) * (isBad ? 2.4 : 1);
        const failed = random() < 0.015;
        const when = new Date((begin + hour * 3600 + one * 61 + other * 7) * 1000).toISOString().slice(0, 19);
        lines.push(`${when}Z,192.0.2.${1 + one * 10 + (one === 6 ? 9 : 0)},192.0.2.${1 + other * 10 + (other === 6 ? 9 : 0)},${failed ? "" : rtt.toFixed(2)}`);
      }
    }
  }
  return lines.join("\n");
}
