"""The check of machine code for registers of products in flight, on code written by hand."""

from __future__ import annotations

from support.sass import functions, hazards


def check(code: str) -> list[str]:
    lines = [".text.kernel:"]
    for number, line in enumerate(filter(None, map(str.strip, code.splitlines()))):
        lines.append(line if line.endswith(":") else f"        /*{number:04x}*/  {line} ;")
    ((name, body),) = functions("\n".join(lines))
    assert name == "kernel"
    return [text.split(": ", 1)[1] for text in hazards(body)]


PRODUCT = "HGMMA.64x64x8.F32.TF32 R24, R120, gdesc[UR16], R24, gsb0"


def test_a_write_under_a_product() -> None:
    assert check(f"{PRODUCT}\nLDS R121, [R2]\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nEXIT") == [
        "LDS R121, [R2]"
    ]
    assert not check(f"{PRODUCT}\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nLDS R121, [R2]\nEXIT")
    assert not check(f"{PRODUCT}\nLDS R124, [R2]\nEXIT")
    assert check(f"{PRODUCT}\nLDS.128 R117, [R2]\nEXIT") == ["LDS.128 R117, [R2]"]


def test_a_wait_that_leaves_the_newest_group() -> None:
    other = PRODUCT.replace("R120", "R128")
    code = f"{PRODUCT}\n{other}\nWARPGROUP.DEPBAR.LE gsb0, 0x1\n"
    assert not check(code + "IMAD.MOV.U32 R120, RZ, RZ, R3\nEXIT")
    assert check(code + "IMAD.MOV.U32 R128, RZ, RZ, R3\nEXIT")


def test_products_without_a_group_yet() -> None:
    loose = PRODUCT.replace(", gsb0", "")
    assert check(f"{loose}\nMOV R123, R1\nEXIT") == ["MOV R123, R1"]


def test_the_end_of_a_loop() -> None:
    """What ptxas of CUDA 13.0 did: the fetch of the next round before its wait."""
    loop = f"""
        MOV R1, RZ
        .L_x_1:
        {{first}}
        {{second}}
        {PRODUCT}
        @P0 BRA `(.L_x_1)
        WARPGROUP.DEPBAR.LE gsb0, 0x0
        EXIT
    """
    fetch, wait = "LDS R120, [R2]", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert check(loop.format(first=fetch, second=wait)) == [fetch]
    assert not check(loop.format(first=wait, second=fetch))


def test_predicates_and_stores_write_no_register() -> None:
    code = f"{PRODUCT}\nISETP.NE.AND P0, PT, R120, RZ, PT\nSTS [R120], R121\n"
    assert not check(code + "@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R120+URZ], RZ\nEXIT")
    assert check(f"{PRODUCT}\nLOP3.LUT P1, R122, R1, 0x1, RZ, 0xc0, !PT\nEXIT")
