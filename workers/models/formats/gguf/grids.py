"""The grids of llama.cpp's types IQ1 to IQ3: a code is the index of a row of integers.

Each grid is llama.cpp's table, with sorted rows. It is stored as differences between successive rows, where a row is a
number whose digits are the indices of its values, the first column being the lowest digit.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

# For each type: columns of a row, possible values, and the differences.
TABLES: dict[str, tuple[int, tuple[int, ...], str]] = {
    "IQ1_S": (
        8,
        (-1, 0, 1),
        "eNqNV2uX4yAIrYIkk7Yzs9/3///ONbwETWb2eJoaHyhwuZDHo3qDR+tP7L/2IB7Zw4j18FF0tvbeuRJ9xka3H/afO6g/ZTXqyeBvT91J3JDP+9K3"
        "U3bpc7Ki6mzR8Zrah8qsPvvZV7/6P7m+hU8Uycgnr3fFWy3OXmNr7P0JOvJS6XSrO6ilpY3Zg29pMmuw7Cn9pavB729NVpHawprM7Gync8e3e6QF"
        "X6Ha2mwutyx6JvJ5w7ZFb1j9dpCsL3tsxeoTGWvhjmVaWdJI9u3w/9AP025QuaCSC1tS0LWzb9C1rRf3FCQcHSk2Cx3LQ+txH2RJkO7x0ddu/X+b"
        "vGMYw77+SJgwBERUXM2Kfzc+l5ItzZ+keJujGG/ndtV4T16VETkRGHXk8TGwKGsP9/9oclLTXaRYborF4yaOjhADhklQrW2EwglNUTrvGhq321h+"
        "uabSvllTYZKBioGwOlm86rkZQ4LpZ4ikQ32PHRetv1E/GXqflljIkkwaqW0zRnF6NzwO1Bfl6BmzzWMEbk6FEJPGzmaZoZewwhbyQYwd6wHfpyQd"
        "MMRr5IbBnRZb5plvj3vZ/cl2jDyEgQGjvqQZghLPZ37JtqoXs/Gm40xa/IF+f8tLeceHx19hPBSXIX6DBWElebZMVqO0Wvw+W7bcsuysW7loddEe"
        "lhlYZNaJfWfZ4FKuzxzsMsaAUWgjLUUmKg7r5FPpxzm8jCe6xMTqddA21hAz1MboQUdc1HDE1ZYs9QrMSwl9gpB3yFCCNrEo6R2Kj0l2tkz80uqp"
        "MMuJtd/KeV+e0evEfnXJsruum+MUU910VlMzB9Wg56bjEE4W/zVl8Jx1IoJQJeX8Dvz7Uq+NrCBZZtcsmPMjuCdivILfwyqr0wvviVEK+3cLFs6Z"
        "poWq4a4+rKG6jFo2nQHvrRKeavN15q1V5uaZGLW2pcBG0d8jB1zVZKfPP1MlLFazeAHWZgssF2tI8Ppk1PDRDqbtPtWtVkMcv1jwfZPJJQopZOhd"
        "v0fmfLRiHr3GLV5vjDyT/UYar8NWVceeCaU7R1qOG3nuGrFlyhQlRQ54LfV/fFRDvb/W2qSs2QIzGSeT+gU9QoyRDq9UMbBx4aoFXe+VO2YLx+oD"
        "Ug6XOvCjtz19vbycid8/xNLVF9rInoXZIWZTqStBY0a+TPHXSvGP+p5CdQvO+38nLOSKgJbcf9Yx5g3gHSOTgPI2OsPVhWmeP+i+a5VO3EPf0dyK"
        "Wcpq23+TJxmh",
    ),
    "IQ2_XXS": (
        8,
        (8, 25, 43),
        "eNpVkcFKw0AURa8yhBCGICGEQcpQJEgoEkJxUaQLFyLSRZEupMt+iUs/wG/xW/wez7yOQQkzmffm3vvueyNd/vkKlpvPhZ0LW16l/Z1qRSJP1KjX"
        "tWWrmevz2c9xrZZTpWCMyPrV9bN+x23QBtRz1ivB+VwvIRsylSbWOjM9uistdQPiyViNFvhxRKPuLNPpynyv2Sf+rxlXawDb6kRVz8277v91XIB3"
        "uZPGdFMc2IP5iOahR70j2uqQkY5KK2NucHbuNPXXswe8jfSXPATtdAuyIr+Ev9Xe+AHlAW6E4fQGctSHvk29xcXCJv+ol/kt0hukGXTcN2gedET7"
        "PP+R7KAHPLVUOuqLqXwaNoI5qbyY9APstxgE",
    ),
    "IQ2_XS": (
        8,
        (8, 25, 43),
        "eNqFkkFrwzAMhYUJxpgQQgihjFBKGKGMEkoZPYwdeuhpjJ3HTjvtuN+yn7zPshfapukwcSVVek96loiZOdkV357Y4fNXK+1ZhU2/1VnU651JIU7q"
        "f5jC7WcxPAitWoXGW1lcdJMpWugkB8GlaEWmhbvi3iSGW13Yk8ppFxXYhg5ivOLcT7KClWO3qWKP18g28ZR4NX4mgxzlYaLpH081WpaaFTUdE0eW"
        "knsPviee4z2n2T24Nd09EV3w9Zp/S/dL7a7PnMHhUlWh3NP9iNqUauWqdXixBmsYURynI16nmd5mNqgdt8bIoyxlN2rjVJfwuhZFraxBafBy7bBT"
        "TYx8627EjpzqbeQLtCVZhbxqLxt5B3snB6pC5dwGNCe6BW6LqvHVy7Fjo7pURGo4Bu5et66k2iuGk084ArIfpyz4f0FuKy/cNfE7VeFAtaG/D6br"
        "eduVskWdHegDOV3SPlSHbtbyoxhx/7aKE14paN/D8wuWLBmh",
    ),
    "IQ2_S": (
        8,
        (8, 25, 43),
        "eNqdVUtqw0AMFWEQQzBmMCWYYEowxYRQsighiy57hp6hi9z/AJU0Y2f+cYKxPZalZ+k9aQywKRxqxTPSVWUjMYlSwRuMfBB0gNAKsiKrfpBHfGDh"
        "iymKepA3wjbKyLcjdJkaS2xwJW2QH1t8RE14jGutWxihyVauqvqoatU1Je9rs/CDLnd01nzNzzFZ82D8lOV9optOIvsMloEdrRihhWNRK5uFlg5U"
        "gUZzT2KQjSZdZnZ64UUVO65eGXfU4N4ZmAKe945phG+qoiE/7oa3lYr6s4DZrHLzUldm9saojv7lPlvTFbMCXZbRnXirSnxTjG1Fa15dn9rxwjl5"
        "rac5clgdnbMNSwddM+813YelOgMn6px09/CVLPNk6CuWr0O0Y/mZ8Fywp4Ef18FH+mZDffwLn8G8+juLvxOit/OU+UbnY72s5ZwwqVfzqGWmLOo1"
        "mMBJUHrqsQudG6qlE4vyJqek9h1FE461fkXcp314kswPFDku6l5oNdL9Jrj2jzjvThOdA+U2in6M+u54Ug5xFO0M/BGOoQzOVO0gfxfO4oOe/gGn"
        "vRmh",
    ),
    "IQ3_XXS": (
        4,
        (4, 12, 20, 28, 36, 44, 52, 62),
        "eNpNkF1Pg0AQRS8g39AiFKnB1tbapBoToz77pr41/v9/45kpIYbsLjtz5s6dlUK+mHWlgD1Vrlu/XaIpf5GfpSplE516xKhCiRaciVeXOqjTCsLo"
        "0OOdGn1oIGqaPXQza19Oqwu09ojFXud8qgcUQmpy1dSVaBx0Ym/RrXQms/unZF5z3btmNCmMPlnmt4vLmr3Gj832wtqjsuZewH67m0F384w9bDy7"
        "KDlH71aTabTEySd7B5HgaKR7S+bEWkEvYCt6nLkt6dtAXWsLdSRrnXtykau/03fAaQI1QNhsmZ60mebOiP7i2MjGKzYQW5QeqflB7ag3OlveXiDA"
        "SQNf6BlfsW7wbP32RO2NWn3pD/JpD5k=",
    ),
    "IQ3_S": (
        4,
        (1, 3, 5, 7, 9, 11, 13, 15),
        "eNpVU2tPwzAMdNo82iZdV7bBxkACDWmC7xP//59xvjjTUJXEdvw4X1wRh6+XjqfD2VH2EiVA6s2icoLW3/08vdTiqSWZsQfEOVoc73r6aLaWaYY0"
        "QPe0JNaIjJiZp5dMTa2R+yIT9MLbYL4LpMwMG1mhJeZuPopk/4CzdVV70BjNPxJr7VGjEqsl3kfsk/HiDcnE1Vio+BwjV0jZWJpZpXJyeMi5yJXd"
        "6f35zmiBTaOHfyi7OypnHFV9trfSFY3bumuNI7WJuRPxe2KubHr026pGdJixj7An3p0oBVi0RsY+0HuSN3LpiTvD8mp4Oka02ehZLzKqYyZFuyWG"
        "elPf8ERugvU28lQ0A+dNp2jlC8/MnYlggrbD92HsZrnYm9T+Ez6tFKx25JRE4lZ0gTwEvIDyVOgX7JUuOJ+Q0QFZIdJPSCsij5wwZenEXIqy1iv2"
        "b1SeR+BSJidWneUFp0OtGWexySm4LfKFtUPULzvZ4GwzewD+LXK9yzPQRPatXBaivsF3weqBZA/fs3wj5kY0o2XQSpohw7PDm7V/Tvk8cTI2yF3/"
        "6qP8wPcDSK/yB74/D8E=",
    ),
}


@cache
def grid(name: str) -> NDArray[np.int8]:
    """The grid of a type: integers [rows, columns]."""
    columns, values, text = TABLES[name]
    rows = np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2"), dtype=np.int64)
    places = rows[:, None] // len(values) ** np.arange(columns) % len(values)
    found: NDArray[np.int8] = np.array(values, np.int8)[places]
    found.setflags(write=False)
    return found


@cache
def signs() -> NDArray[np.int8]:
    """[128, 8]: the signs of eight values by seven bits; the eighth sign makes the number of minuses even."""
    bits = np.arange(128)[:, None] >> np.arange(7) & 1
    found: NDArray[np.int8] = (1 - 2 * np.concatenate([bits, bits.sum(axis=1, keepdims=True) & 1], axis=1)).astype(np.int8)
    found.setflags(write=False)
    return found
