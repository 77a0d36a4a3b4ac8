"""The appearance of a report: its tables as text, its colours as numbers."""

from __future__ import annotations

from typing import Any

#: The least contrast that WCAG 2 requires for text (success criterion 1.4.3, level AA), and for large text.
LEAST_CONTRAST, LEAST_CONTRAST_LARGE = 4.5, 3.0

# Colours are blended on a canvas: it knows every notation of a colour, and gives back plain bytes.
_CONTRASTS = """
root => {
    const canvas = document.createElement('canvas');
    canvas.width = canvas.height = 1;
    const brush = canvas.getContext('2d', {willReadFrequently: true});
    const blend = colors => {
        brush.fillStyle = '#ffffff';
        brush.fillRect(0, 0, 1, 1);
        for (const color of colors) { brush.fillStyle = color; brush.fillRect(0, 0, 1, 1); }
        return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = rgb => {
        const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
        const element = node.parentElement;
        if (!node.textContent.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
        if (!element.getClientRects().length) continue;
        const behind = [];
        for (let each = element; each; each = each.parentElement) {
            behind.unshift(getComputedStyle(each).backgroundColor);
        }
        const style = getComputedStyle(element);
        const color = element instanceof SVGElement ? style.fill : style.color;
        const [a, b] = [luminance(blend([...behind, color])), luminance(blend(behind))];
        const size = parseFloat(style.fontSize);
        found.push({
            text: node.textContent.trim().slice(0, 60),
            tag: element.tagName.toLowerCase(),
            kind: element.getAttribute('class') ?? '',
            ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05),
            large: size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700),
        });
    }
    return found;
}
"""


def contrasts(root: Any) -> list[dict[str, Any]]:
    """Measure the contrast of each visible text in an element: text, tag, class, ratio, and whether it is large."""
    found: list[dict[str, Any]] = root.evaluate(_CONTRASTS)
    return found


def hard_to_read(root: Any) -> list[str]:
    """Describe the visible texts in an element whose contrast is below WCAG's level AA."""
    return sorted(
        {
            f"{each['ratio']:.2f} {each['tag']}.{each['kind']}: {each['text']}"
            for each in contrasts(root)
            if each["ratio"] < (LEAST_CONTRAST_LARGE if each["large"] else LEAST_CONTRAST)
        }
    )
