"""S as a picture."""

import torch


def projection_image(projection: torch.Tensor, scale: int = 6) -> torch.Tensor:
    """S [heads, d_k, d_k′] as uint8 [height, width, 3]: heads side by side, an entry a square of `scale` pixels.

    White is zero, red positive, blue negative; full colour is the largest absolute value.
    """
    values = projection.detach().float().cpu().nan_to_num(0.0)
    values = values / values.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    gap = torch.zeros(*values.shape[:2], 1)
    sheet = torch.cat([part for head in values for part in (head, gap[0])], dim=1)[:, :-1]
    sheet = sheet.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    fade = 1.0 - sheet.abs()
    red, blue = torch.where(sheet >= 0, 1.0, fade), torch.where(sheet <= 0, 1.0, fade)
    return (torch.stack([red, fade, blue], dim=-1) * 255).round().to(torch.uint8)
