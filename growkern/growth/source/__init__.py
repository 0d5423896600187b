"""Opens the checkpoints and models that growth reads."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.source.config import (checked_config, is_same, load_config, read_config,
        refuse_misread)
    from growkern.growth.source.distributed import SafeReader
    from growkern.growth.source.files import (Header, read_headers, refuse_links_out, Transposed,
        weight_file)
    from growkern.growth.source.formats import (beside_weights, format_of, header_reader,
        MODULES_FILE, Stamps, weight_files)
    from growkern.growth.source.hub import is_hub_name, located, name_of, refuse_other_names
    from growkern.growth.source.live import refuse_computed
    from growkern.growth.source.loading import class_in, load_model
    from growkern.growth.source.parts import Assembled, Parts, Run, Stacked
    from growkern.growth.source.refused import (config_directory, config_of, leave_out_quantisation,
        METADATA_FILE, OPTIMIZER, pieces_in, quantisation_of, refuse_adapter_directory,
        refuse_adapters, refuse_bare, scale_block, STATE_FILES, WEIGHTS)
    from growkern.growth.source.source import open_source, refuse_unreadable, Source
    from growkern.growth.source.unknown import what_leads_on
# fmt: on

__getattr__ = opener(__name__, __file__)
