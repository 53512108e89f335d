"""Print the commands of Markdown files: the lines of their ```bash blocks, in order."""

import re
import sys
from pathlib import Path

for name in sys.argv[1:]:
    blocks = re.findall(r"^```bash\n(.*?)^```", Path(name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if not blocks:
        sys.exit(f"{name} has no bash blocks")
    print("\n".join(block.rstrip() for block in blocks))
